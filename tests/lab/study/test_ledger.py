"""The file of results: complete lines only, each run once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from halfway.lab.study import ledger, plan
from halfway.lab.study.run import todo


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    assert ledger.read(path) == []
    for key in "abc":
        ledger.append(path, {"key": key, "score": 1.5})
    assert [entry["key"] for entry in ledger.read(path)] == ["a", "b", "c"]
    assert path.read_text().count("\n") == 3


def test_of_equal_runs_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for score in (1, 2):
        ledger.append(path, {"key": "a", "score": score})
    assert ledger.read(path) == [{"key": "a", "score": 1}]


@pytest.mark.parametrize("line", ['{"key": "b", "sco', '{"score": 3}', "7", ""])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    ledger.append(path, {"key": "a"})
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 2 is not a result: delete that line"):
        ledger.read(path)


def test_what_is_left_is_what_the_file_does_not_have_each_once(tmp_path: Path) -> None:
    arms = {"full": {}, "same": {"method": "full"}, "half": {"method": "random", "prune_ratio": 0.5}}
    runs = plan.runs("a", {"recipes": ["ladder-c16"], "seeds": [1, 2], "arms": arms}, "data")
    path = tmp_path / "runs.jsonl"
    assert len(runs) == 6
    assert [(run.arm, run.seed) for run in todo(runs, path)] == [("same", 1), ("half", 1), ("same", 2), ("half", 2)]
    ledger.append(path, {"key": runs[0].key})
    ledger.append(path, {"key": runs[5].key})
    assert [(run.arm, run.seed) for run in todo(runs, path)] == [("half", 1), ("same", 2)]
