PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench matrix zoo-matrix

# Everything sets itself up: the first call makes a virtual environment and installs into it.
$(BIN)/halfway: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]" --constraint constraints.txt
	touch $@

demo: $(BIN)/halfway
	$(BIN)/halfway demo

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(BIN)/halfway
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BIN)/halfway
	$(BIN)/python benchmarks/zoo.py

# The compatibility matrix, from the tests that run.
matrix: $(BIN)/halfway
	$(BIN)/python -m pytest -n 2 -m "not slow" --matrix=docs/compatibility.md

# The table of the model zoo, which `make matrix` leaves alone. About ten minutes.
zoo-matrix: $(BIN)/halfway
	$(BIN)/python -m pytest -n 2 tests/engine/test_model_zoo.py --zoo-matrix=docs/compatibility.md
