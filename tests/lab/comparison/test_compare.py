"""`halfway compare`: trains what is missing, nothing twice, and times side by side."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab.cli import main
from halfway.lab.comparison import run as comparison
from halfway.lab.comparison import trials
from halfway.lab.recipes import reading
from halfway.lab.training.run_result import RunResult

SMALL = [
    "data.train_samples=128",
    "data.test_samples=40",
    "model.options={width: 8, blocks: [1, 1, 1, 1]}",
    "batch_size=32",
    "length=3",
    "window=[1, 3]",
]


def compare(out: Path, *words: str) -> int:
    return main(["compare", "tiny-cifar10", "--data", "synthetic", "--out", str(out), *SMALL, *words])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "c"
    assert compare(out, "--ratios", "0.25,0.5", "--seeds", "0,1", "--rounds", "3") == 0
    return out


def test_full_data_are_trained_once_per_seed_and_the_rest_per_ratio(compared: Path) -> None:
    runs = sorted(path.name for path in compared.iterdir() if path.is_dir())
    pruned = [f"{method}-{p}-s{s}" for method in ("pfb", "random") for p in ("0.25", "0.5") for s in (0, 1)]
    assert runs == sorted(["full-s0", "full-s1", *pruned])


def test_the_table_holds_what_the_runs_measured(compared: Path) -> None:
    content = json.loads((compared / "results.json").read_text())
    rows = {row["label"]: row for row in content["rows"]}
    for label, folder in (("full", "full"), ("pfb, p = 0.5", "pfb-0.5"), ("random, p = 0.25", "random-0.25")):
        scores = [RunResult.read(compared / f"{folder}-s{seed}").score for seed in (0, 1)]
        assert rows[label]["mean"] == pytest.approx(sum(scores) / 2)
        assert [rows[label]["scores"][str(seed)] for seed in (0, 1)] == scores
    assert rows["random, p = 0.25"]["flops"] == pytest.approx([0.75, 0.75 * 2 / 3 + 1 / 3])
    table = (compared / "table.md").read_text()
    assert f"`{content['command']}`" in table
    for row in rows.values():
        assert f"{row['mean']:.2f} ± " in table


def test_steps_are_timed_for_every_group(compared: Path) -> None:
    timing = json.loads((compared / "timing.json").read_text())["steps"]
    assert set(timing) == {"full", *(f"{m}, p = {p}" for m in ("random", "pfb") for p in (0.25, 0.5))}
    assert timing["full"]["median"] == 1
    assert all(0 < t["q1"] <= t["median"] <= t["q3"] for t in timing.values())


def test_several_processes_train_the_same_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--methods", "full,random", "--ratios", "0.5", "--seeds", "0", "--rounds", "0")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert compare(tmp_path / "one", *words) == 0
    finally:
        torch.set_num_threads(threads)
    assert compare(tmp_path / "two", *words, "--workers", "2") == 0
    scores = [
        {path.name: RunResult.read(path).score for path in (tmp_path / name).iterdir() if path.is_dir()}
        for name in ("one", "two")
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
    assert RunResult.read(tmp_path / "two" / "full-s0").sessions[-1]["threads"] == 1
    capsys.readouterr()
    assert compare(tmp_path / "two", *words, "--workers", "2") == 0, "nothing is left to train"
    assert "2 of 2 runs are done already" in capsys.readouterr().out


def test_a_run_that_fails_in_a_process_is_an_error_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--methods", "random", "--ratios", "0.5", "--seeds", "0", "--rounds", "0", "optimizer.lr=1e30")
    assert compare(tmp_path / "hot", *words, "--workers", "2") == 2
    assert "1 of 1 runs failed, see above; the same command trains what is left" in capsys.readouterr().err
    assert compare(tmp_path / "none", "--workers", "0") == 2
    assert "--workers must be at least 1" in capsys.readouterr().err


def test_what_is_done_is_skipped_and_more_can_be_added(
    compared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in compared.glob("*/last.pt")}

    before = stamps()
    assert compare(compared, "--ratios", "0.25,0.5", "--seeds", "0,1", "--rounds", "3") == 0
    assert "10 of 10 runs are done already" in capsys.readouterr().out
    assert stamps() == before
    assert compare(compared, "--ratios", "0.5", "--seeds", "0,1,2", "--methods", "full,random", "--rounds", "0") == 0
    assert {path.parent.name for path in stamps().keys() - before.keys()} == {"full-s2", "random-0.5-s2"}
    assert {path: stamp for path, stamp in stamps().items() if path in before} == before


def test_a_comparison_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = comparison.session.train, iter([True, False])

    def interrupted(*args: Any, **kwargs: Any) -> bool:
        return original(*args, **kwargs) if next(calls) else False

    with monkeypatch.context() as patch:
        patch.setattr(comparison.session, "train", interrupted)
        assert compare(tmp_path / "c", "--seeds", "0", "--rounds", "0") == 130
    assert compare(tmp_path / "c", "--seeds", "0", "--rounds", "0") == 0
    assert len(json.loads((tmp_path / "c" / "results.json").read_text())["rows"]) == 3


def test_a_lost_checkpoint_matters_only_where_the_run_must_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--methods", "full", "--seeds", "0", "--rounds", "0")
    assert compare(tmp_path / "c", *words) == 0
    run = tmp_path / "c" / "full-s0"
    (run / "last.pt").unlink()
    assert compare(tmp_path / "c", *words) == 0, "it is finished"
    first, *_ = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(first)
    assert compare(tmp_path / "c", *words) == 2
    assert f"{run / 'last.pt'} is gone" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == first


def test_a_full_disk_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ("--methods", "full", "--seeds", "0", "--rounds", "0")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        patch.setattr(sys, "argv", ["halfway", "compare", "tiny-cifar10"])
        assert compare(tmp_path / "c", *words) == 2
    said = capsys.readouterr().err
    assert "last.pt could not be written; free some space, then go on: halfway compare tiny-cifar10\n" in said
    assert compare(tmp_path / "c", *words) == 0


def test_another_recipe_in_the_same_folder_is_refused_before_training(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(compared, "--ratios", "0.5", "--seeds", "0,7", "label_smoothing=0.3") == 2
    assert "label_smoothing was 0.1, is 0.3" in capsys.readouterr().err
    assert not (compared / "full-s7").exists()


def test_a_sweep_runs_only_the_methods_that_look_at_the_setting(tmp_path: Path) -> None:
    out = tmp_path / "c"
    assert compare(out, "--seeds", "0", "--rounds", "2", "--over", "density.noise=0.001,1") == 0
    runs = {path.name for path in out.iterdir() if path.is_dir()}
    assert runs == {"full-s0", "random-0.5-s0", "pfb-0.5-density.noise=0.001-s0", "pfb-0.5-density.noise=1-s0"}
    noise = RunResult.read(out / "pfb-0.5-density.noise=0.001-s0").recipe.methods["density"]["noise"]
    assert noise == 0.001


def test_controls_are_trained_beside_the_methods_and_judge_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    words = ["--methods", "random,random_even,smaller_batch", "--seeds", "0,1", "--controls", "0.5,0.75"]
    assert compare(out, *words, "--rounds", "2") == 0
    said = capsys.readouterr().out
    assert "vs shorter" in said
    assert "Not judged" not in said
    content = json.loads((out / "results.json").read_text())
    rows = {row["label"]: row for row in content["rows"]}
    # Two of three epochs prune a half of each batch.
    even = [0.3333, 0.5, 0.25]
    assert {label for label in rows if label.startswith("random_even")} == {f"random_even, p = {p}" for p in even}
    assert {row["cost"] for label, row in rows.items() if label.startswith("shorter")} == {0.5, 0.75}
    random = rows["random, p = 0.5"]
    assert random["cost"] == pytest.approx(2 / 3)
    assert rows["smaller_batch, p = 0.3333"]["cost"] == pytest.approx(21 / 32)
    assert random["controls"].keys() == {"random_even", "shorter"}
    assert random["controls"]["random_even"]["ends"] == pytest.approx([0.5, 1.0])
    timing = json.loads((out / "timing.json").read_text())["steps"]
    assert timing["shorter, p = 0.5"]["median"] == 1, "fewer steps, and the same ones"
    assert timing.keys() == rows.keys()
    assert "random, p = 0.5: " in (out / "table.md").read_text()
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "random pruning without window" in page
    assert "full data for fewer steps" in page


def test_what_is_not_judged_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path / "c", "--methods", "full,random", "--seeds", "0", "--rounds", "0") == 0
    assert "shorter at that cost: random, p = 0.5. --controls auto" in capsys.readouterr().out


def test_another_draw_of_the_same_seed_is_compared_with_the_first(tmp_path: Path) -> None:
    out = tmp_path / "c"
    words = ["--methods", "random", "--seeds", "0,1", "--rounds", "0", "--over", "selection_seed=null,9"]
    assert compare(out, *words) == 0
    first, second = json.loads((out / "results.json").read_text())["rows"]
    assert (first["label"], second["label"]) == ("random, p = 0.5", "random, p = 0.5, selection_seed=9")
    assert first["minus_random"] is None
    assert second["minus_random"]["n"] == 2


def test_the_option_of_older_commands_names_its_successor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare(tmp_path / "c", "--fewer-epochs")
    assert "--fewer-epochs is now --controls auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "a,b"], "--seeds takes numbers"),
        (["--ratios", "0.5,1.5"], "in [0, 1)"),
        (["--methods", "full,magic"], "unknown method 'magic'"),
        (["--over", "density.nois=1,2"], "did you mean noise"),
        (["--over", "cut"], "key=value"),
        (["--controls", "cheap"], "--controls takes numbers"),
        (["--controls", "60"], "between 0 and 1, got 60"),
    ],
)
def test_a_mistake_is_named_before_anything_is_trained(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path / "c", *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "halfway"]
    words = ["compare", "tiny-cifar10", "--data", "synthetic", "--seeds", "0", "--out", str(tmp_path / "c"), *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *words], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("run 1 of 3") == 1
    assert (tmp_path / "c" / "table.md").exists()


def test_timing_compares_other_batch_sizes_with_full_training_of_their_own() -> None:
    r = reading.load("tiny-cifar10").with_settings(
        {**reading.parse_settings(SMALL), "root": "synthetic", "data.train_samples": 128}
    )
    plan = trials.plan(r, ["full", "random"], [0.5], [0], {"batch_size": [16, 64]})
    groups = {trial.group: trial.recipe for trial in plan}
    few = {group: 1e-6 for group in groups if group.label == "random, p = 0.5, batch_size=16"}
    timing = comparison.time_steps(list(groups), groups, torch.device("cpu"), 3, shares=few)
    assert timing["full, batch_size=16"]["median"] == timing["full, batch_size=64"]["median"] == 1
    assert len(timing) == 4
    # Whole steps, but few of them, for whoever decides before the epoch.
    assert (
        timing["random, p = 0.5, batch_size=16"]["median"] < 1e-3 < timing["random, p = 0.5, batch_size=64"]["median"]
    )


def test_a_table_of_what_is_finished_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path / "c", "--table") == 2
    assert "no run of this comparison is finished" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
