PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test lint docs dist bench gpu matrix zoo-matrix cuda-matrix

# Everything sets itself up: the first call makes a virtual environment and installs into it what that command needs.
# An empty file in the environment remembers what is there.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.lab: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[lab]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[docs]"
	touch $@

demo: $(VENV)/.lab
	$(BIN)/halfway demo

test: lint
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

# Style, types, and which room may import which.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The documentation as a site, in site/. A dead link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel and a source archive, in dist/.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Into runs/zoo: the results in benchmarks/ stay as they are.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/zoo.py --out runs/zoo

# On a machine with a GPU, under an hour: tests, step times, trainings, into benchmarks/results/gpu/. Resumes.
gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu.py --download

# The compatibility matrix, from the tests that run.
matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow or matrix" --matrix=docs/compatibility.md

# The table of the model zoo, which `make matrix` leaves alone. About ten minutes.
zoo-matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 tests/engine/test_model_zoo.py --zoo-matrix=docs/compatibility.md

# The table of what CUDA would run, from models on fake CUDA tensors. No GPU needed; about ten minutes.
cuda-matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 tests/engine/test_on_cuda.py --cuda-matrix=docs/compatibility.md
