"""Methods that decide once, side by side with the others: chosen first, charged once, judged as samplers are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.coresets import Coreset
from halfway.lab.cli import main
from halfway.lab.comparison import pool
from halfway.lab.comparison.results import read, rivals
from halfway.lab.comparison.trials import group_of
from halfway.lab.training import session
from halfway.lab.training.run_result import RunResult
from tests.helpers.subsets import recipe_file

METHODS = "full,random_coreset,forgetting"


def words(where: Path, *more: str) -> list[str]:
    recipe = recipe_file(where / "tiny.yaml")
    out = ["--out", str(where / "table"), "--rounds", "0", "--seeds", "0,1"]
    return ["compare", recipe, "--methods", METHODS, "--ratios", "0.5", *out, *more]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("compared")
    assert main(words(where)) == 0
    return where


def test_proxies_are_trained_side_by_side_too_and_only_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    train = pool.train

    def noted(jobs: Sequence[pool.Job], *more: Any) -> int:
        trained.extend(job.label for job in jobs)
        return train(jobs, *more)

    monkeypatch.setattr(pool, "train", noted)
    few = ("--workers", "2", "--methods", "forgetting", "--seeds", "0")
    assert main(words(tmp_path, *few)) == 0
    assert trained == ["proxy long-s1000", "forgetting, p = 0.5, seed 0"]
    proxy = RunResult.read(tmp_path / "coresets-tiny" / "long-s1000")
    assert proxy.sessions[-1]["threads"] == 1
    assert "choosing" in capsys.readouterr().out
    trained.clear()
    assert main(words(tmp_path, *few)) == 0
    assert trained == [], "all of it is there"


def test_each_seed_has_its_own_choice_from_the_same_proxy(compared: Path) -> None:
    proxies = compared / "coresets-tiny"
    assert sorted(path.name for path in proxies.iterdir() if path.is_dir()) == ["long-s1000"]
    for method in ("random_coreset", "forgetting"):
        first, second = (Coreset.load(proxies / f"{method}-0.5-s{seed}.pt") for seed in (0, 1))
        assert first.ids.tolist() != second.ids.tolist()
        for seed, coreset in ((0, first), (1, second)):
            run = RunResult.read(compared / "table" / f"{method}-0.5-s{seed}")
            assert run.recipe.coreset.file == str(proxies / f"{method}-0.5-s{seed}.pt")
            assert run.cost == pytest.approx(8 / 20)
            assert len(coreset) == 80


def test_the_table_has_keep_and_the_cost_with_the_proxy(compared: Path) -> None:
    page = (compared / "table" / "table.md").read_text()
    assert "| keep | FLOPs with proxy |" in page
    assert (
        "forgetting, p = 0.5: keeps 0.5 of the images; a run cost 0.400 of one on full data, with its proxies" in page
    )
    assert "Proxies long: as much as 1.00 runs on full data, once, for forgetting, p = 0.5." in page
    assert "random_coreset, p = 0.5: keeps 0.5 of the images; a run cost 0.400 of one on full data, and the" in page
    recorded = read(compared / "table")
    assert recorded is not None
    rows = {row.group.method: row for row in recorded.rows}
    assert rows["full"].keep is None
    assert rows["forgetting"].keep == 0.5
    assert rows["forgetting"].with_proxy == pytest.approx(0.4 + 1.0)
    assert rows["random_coreset"].with_proxy == pytest.approx(0.4)
    content = json.loads((compared / "table" / "results.json").read_text())
    assert [each["label"] for each in content["prepared"]] == ["random_coreset, p = 0.5", "forgetting, p = 0.5"]


def test_the_same_command_again_trains_and_chooses_nothing(
    compared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "train", lambda *_, **__: pytest.fail("trained again"))
    assert main(words(compared)) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 runs are done already" in shown
    assert "choosing" not in shown
    assert main(words(compared, "--table")) == 0


def test_they_are_judged_beside_methods_that_take_as_few_steps() -> None:
    assert rivals("forgetting") == rivals("random_subset") == ("rs2", "shorter")


def test_settings_that_do_not_matter_make_no_further_runs() -> None:
    settings = {"window": (1, 3), "cut": "layer2", "coreset.equal_steps": True, "density.noise": 1.0}
    assert group_of("forgetting", 0.5, settings).settings == (("coreset.equal_steps", True),)
    assert group_of("full", 0.5, settings).settings == ()
    assert ("coreset.equal_steps", True) not in group_of("pfb", 0.5, settings).settings


def test_a_file_for_all_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "coreset.file=some.pt")) == 2
    assert "drop coreset.file=" in capsys.readouterr().err
    assert not (tmp_path / "table").exists()
