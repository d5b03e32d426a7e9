"""What is published of the map is what its ledger gives: the evidence that comes with halfway, and the page."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

from halfway.lab.study import evidence, ledger, plan
from halfway.lab.study.results import Study, collect
from tests import ROOT

MAP = ROOT / "results" / "map"


@pytest.fixture(scope="module")
def study() -> Study:
    return collect(plan.read(MAP / "study.yaml"), ledger.read(MAP / "runs.jsonl"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables_of_the_map", MAP / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_evidence_that_comes_with_halfway_is_what_the_ledger_gives(study: Study) -> None:
    packaged = json.loads((ROOT / "src/halfway/advice/evidence.json").read_text())
    found = evidence.extract(study, len(ledger.read(MAP / "runs.jsonl")))
    command = "halfway study results/map/study.yaml --table --evidence src/halfway/advice/evidence.json"
    assert json.loads(json.dumps(found)) == packaged, command


def test_the_tables_of_the_page_are_those_of_the_ledger(study: Study, script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert script.written(page, script.tables(study)) == page, "python results/map/tables.py --write"


def test_a_table_replaces_what_stood_below_its_mark_and_nothing_else(script: ModuleType) -> None:
    page = "before\n\n<!-- a -->\n| old |\n|---|\n\nbetween\n\n<!-- b -->\n| old |\n\nafter\n"
    written = script.written(page, {"a": "| new |", "b": "| newer |"})
    assert written == "before\n\n<!-- a -->\n| new |\n\nbetween\n\n<!-- b -->\n| newer |\n\nafter\n"
    with pytest.raises(ValueError, match="no mark for the table 'c'"):
        script.written(page, {"c": ""})
