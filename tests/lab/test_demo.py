"""`halfway demo`: a tiny run of the whole command, the fairness of the comparison, and honest sentences."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from halfway.lab.cli import main
from halfway.lab.commands import demo as demo_command
from halfway.lab.demo import demo
from halfway.lab.demo import page as demo_page
from halfway.lab.demo import plots as demo_plots
from halfway.lab.demo import summary as words


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="halfway")
    demo_command.register(parser.add_subparsers())
    return parser.parse_args(["demo", *options])


@pytest.fixture(scope="module")
def few_digits() -> demo.Digits:
    d = demo.load_digits()
    return demo.Digits(
        d.train_images[:120], d.train_labels[:120], d.test_images[:60], d.test_labels[:60], d.pixels[:120]
    )


def shrink(patch: pytest.MonkeyPatch, digits: demo.Digits) -> None:
    """Make everything small enough for a test: few images, a narrow model."""
    patch.setattr(demo, "WIDTH", 4)
    patch.setattr(demo, "BATCH_SIZE", 40)
    patch.setattr(demo, "load_digits", lambda: digits)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, few_digits: demo.Digits) -> None:
    shrink(monkeypatch, few_digits)


class Output(NamedTuple):
    folder: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def output(few_digits: demo.Digits, tmp_path_factory: pytest.TempPathFactory) -> Output:
    """What one run of the command leaves behind, in a folder that already holds an old page."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "index.html").write_text("old")
    arguments = parse("--out", str(folder), "--seeds", "2", "--epochs", "3", "--prune-ratio", "0.4")
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        shrink(patch, few_digits)
        assert arguments.run(arguments) == 0
    return Output(folder, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def out(output: Output) -> Path:
    return output.folder


@pytest.fixture
def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


# ------------------------------------------------------------------ the command


def test_the_command_prints_the_table_its_reading_and_where_to_look(output: Output, results: dict[str, Any]) -> None:
    for column in words.COLUMNS:
        assert column in output.stdout
    for method in words.NAMES.values():
        assert re.search(rf"^{method} +\d", output.stdout, re.M)
    for sentence in results["reading"]:
        assert sentence in output.stdout
    assert str(output.folder / "index.html") in output.stdout
    assert "18/18" in output.stderr, "the progress bar counts all epochs of all methods and seeds"


def test_the_page_needs_nothing_from_outside(out: Path) -> None:
    page = (out / "index.html").read_text()
    assert page.startswith("<!doctype html>")
    sources = re.findall(r"""(?:src|href|srcset)\s*=\s*["']([^"']*)""", page)
    assert sources
    assert all(s.startswith("data:") for s in sources)
    assert not re.search(r"https?://|@import|url\(|<script|<link", page)
    assert sorted(p.name for p in out.iterdir()) == ["index.html", "results.json"], "no temporary file is left"


def test_the_page_shows_figures_galleries_and_how_to_repeat_it(out: Path, results: dict[str, Any]) -> None:
    page = (out / "index.html").read_text()
    assert page.count("data:image/png") == 2 * demo_page.GALLERY
    assert page.count("<figure>") == 4
    images = re.findall(r"<img [^>]*>", page)
    assert all(re.search(r'alt="[^"]{8,}"', image) for image in images)
    assert results["headline"] in page.replace("\u00a0", " ")
    assert "halfway demo --prune-ratio 0.4 --seeds 2 --epochs 3" in page
    assert torch.__version__ in page


def test_the_galleries_hold_the_extremes_of_retention(out: Path, results: dict[str, Any]) -> None:
    page = (out / "index.html").read_text()
    shown = [int(r) for r in re.findall(r"digit \d, retained in (\d+)\s%", page)]
    pruned, retained = shown[: demo_page.GALLERY], shown[demo_page.GALLERY :]
    rates = sorted(round(100 * i["retained_by_pfb"]) for i in results["images"])
    assert pruned == rates[: demo_page.GALLERY]
    assert retained == rates[::-1][: demo_page.GALLERY]


def test_results_are_consistent(results: dict[str, Any]) -> None:
    methods = results["methods"]
    assert methods["full"]["flops"] == [1.0, 1.0]
    assert methods["full"]["effective_ratio"] == [0.0, 0.0]
    assert methods["full"]["seconds_ratio"] == [1.0, 1.0, 1.0]
    # One of three epochs prunes, exactly 16 of each 40.
    for method in ("random", "pfb"):
        assert methods[method]["effective_ratio"] == pytest.approx([0.4, 0.4 / 3])
    assert methods["random"]["flops"] == pytest.approx([0.6, 2.6 / 3])
    step, run = methods["pfb"]["flops"]
    assert 0.6 < step < 0.75, "the probe costs something, and not much"
    assert run == pytest.approx((2 + step) / 3)
    for method, m in methods.items():
        runs = [r for r in results["runs"] if r["method"] == method]
        assert m["accuracies"] == [r["accuracy"][-1] for r in runs]
        assert all(len(r[k]) == 3 for r in runs for k in ("accuracy", "seconds", "flops"))
    for by in ("retained_by_pfb", "retained_by_random"):
        assert sum(i[by] for i in results["images"]) / len(results["images"]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prune-ratio", "0"], "share of each batch"),
        (["--prune-ratio", "1"], "share of each batch"),
        (["--prune-ratio", "nan"], "share of each batch"),
        (["--seeds", "0"], "at least 1"),
        (["--epochs", "2"], "at least 3"),
    ],
)
def test_bad_options_are_refused_before_any_training(
    options: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "train_all", lambda *_: pytest.fail("trained"))
    arguments = parse("--out", str(tmp_path / "never"), *options)
    with pytest.raises(ValueError, match=complaint):
        arguments.run(arguments)
    assert not (tmp_path / "never").exists()


def test_an_output_that_is_a_file_is_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "train_all", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("mine")
    arguments = parse("--out", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be made a folder"):
        arguments.run(arguments)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_dependency_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "pip install '.[lab]' in a checkout" in capsys.readouterr().err


# --------------------------------------------------------------- a fair contest


def test_methods_at_one_seed_start_equal_and_see_identical_batches(
    tiny: None, few_digits: demo.Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    step = demo.Run.step

    def recording(self: demo.Run, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
        seen.setdefault(self.record.method, []).extend([x.clone(), y, ids])
        step(self, x, y, ids)

    monkeypatch.setattr(demo.Run, "step", recording)
    settings = demo.Settings(epochs=3, seeds=1)
    runs = [demo.Run(method, 5, settings, few_digits) for method in demo.METHODS]
    start = [{k: v.clone() for k, v in run.model.state_dict().items()} for run in runs]
    for run in runs:
        for epoch in range(2):
            run.epoch(epoch)
    for weights in start[1:]:
        assert all(torch.equal(weights[k], start[0][k]) for k in start[0])
    for method in ("random", "pfb"):
        assert len(seen[method]) == len(seen["full"]) == 2 * 3 * 3
        assert all(torch.equal(a, b) for a, b in zip(seen[method], seen["full"], strict=True))
    before = [run.record.accuracy[0] for run in runs]
    assert before == [before[0]] * 3, "until pruning begins, all methods are the same run"


def test_seeds_and_epochs_differ(tiny: None, few_digits: demo.Digits) -> None:
    first = [next(iter(demo.epoch_batches(few_digits, seed, epoch)))[0] for seed in (0, 1) for epoch in (0, 1)]
    for i in range(4):
        assert not any(torch.equal(first[i], first[j]) for j in range(i))
    one, other = (demo.make_model(seed).state_dict()["fc.weight"] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_the_global_generator_is_not_touched(tiny: None, few_digits: demo.Digits) -> None:
    before = torch.random.get_rng_state()
    run = demo.Run("pfb", 0, demo.Settings(epochs=3), few_digits)
    run.epoch(0)
    run.epoch(1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_augmentation_shifts_each_image_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NOISE", 0.0)
    images = torch.zeros(64, 1, 32, 32)
    images[:, 0, 16, 16] = 1
    shifted = demo.augment(images, torch.Generator().manual_seed(0))
    places = shifted[:, 0].nonzero()
    assert places.shape == (64, 3)
    offsets = places[:, 1:] - 16
    assert offsets.abs().max() == demo.MAX_SHIFT
    assert len(offsets.unique(dim=0)) > 20


def test_split_is_fixed_and_stratified() -> None:
    a, b = demo.load_digits(), demo.load_digits()
    assert torch.equal(a.train_images, b.train_images)
    assert (len(a.train_labels), len(a.test_labels)) == (1200, 597)
    shares = [labels.bincount() / len(labels) for labels in (a.train_labels, a.test_labels)]
    assert torch.allclose(*shares, atol=0.005)
    assert a.train_images.shape == (1200, 1, 32, 32)


def test_runs_take_turns_in_being_first() -> None:
    order = ["full", "random", "pfb"]
    assert [demo.rotated(order, epoch)[0] for epoch in range(4)] == ["full", "random", "pfb", "full"]  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(("seeds", "epochs"), [(1, 3), (3, 10), (10, 40)])
def test_histogram_bins_hold_equally_many_possible_rates(seeds: int, epochs: int) -> None:
    settings = demo.Settings(seeds=seeds, epochs=epochs)
    edges = torch.tensor(demo_plots.rate_bins(settings))
    offers = seeds * (settings.schedule.stop - settings.schedule.start)
    rates = torch.arange(offers + 1) / offers * 100
    held = torch.histogram(rates, edges).hist
    assert held.sum() == len(rates)
    assert len(held[:-1].unique()) <= 1
    assert len(held) <= 26


# ---------------------------------------------------------------- honest words


def summary_of(pfb: list[float], random: list[float], full: list[float]) -> words.Summary:
    finals = {"full": full, "random": random, "pfb": pfb}
    methods = {
        m: words.MethodSummary(
            accuracies=values,
            mean=sum(values) / len(values),
            error=words.standard_error(values),
            versus={o: words.difference(values, finals[o], 597) for o in finals if o != m},
            effective_ratio=(0.5, 0.4),
            flops={"full": (1.0, 1.0), "random": (0.5, 0.6), "pfb": (0.53, 0.624)}[m],
            seconds_ratio=(0.5, 0.6, 0.7),
        )
        for m, values in finals.items()
    }
    return words.Summary(demo.Settings(seeds=len(pfb)), 1200, 597, methods, {})


def test_random_as_good_is_said_plainly() -> None:
    summary = summary_of([0.98, 0.97, 0.985], [0.975, 0.98, 0.975], [0.99, 0.985, 0.99])
    assert words.headline(summary) == "With 50 % of each batch pruned, random pruning did as well as PFB, within noise"
    text = " ".join(words.reading(summary))
    assert "As far as 3 seeds can tell, random did as well as PFB" in text
    assert "is within noise" in text
    assert "bought nothing" in text
    assert "better" not in text


def test_random_better_is_said_plainly() -> None:
    summary = summary_of([0.950, 0.951, 0.949], [0.980, 0.982, 0.979], [0.98, 0.98, 0.98])
    assert words.headline(summary) == "With 50 % of each batch pruned, random pruning beat PFB by 3.0 points"
    text = " ".join(words.reading(summary))
    assert "Random was better than PFB here" in text
    assert "-3.03" in text
    assert "bought nothing" in text


def test_pfb_better_is_said_and_not_more() -> None:
    summary = summary_of([0.980, 0.982, 0.979], [0.950, 0.951, 0.949], [0.98, 0.98, 0.98])
    assert words.headline(summary) == "With 50 % of each batch pruned, PFB beat random pruning by 3.0 points"
    text = " ".join(words.reading(summary))
    assert "PFB was better than random here" in text
    assert "bought nothing" not in text
    assert "PFB ended 0.03 points above full data (within noise)" in text
    assert "This is a toy (1,200 training images" in text


def test_one_seed_carries_no_verdict() -> None:
    summary = summary_of([0.98], [0.95], [0.99])
    assert "on one seed" in words.headline(summary)
    text = " ".join(words.reading(summary))
    assert "a single seed cannot tell" in text
    assert "better" not in text
    assert "bought nothing" not in text


@pytest.mark.parametrize(
    ("mine", "others", "verdict"),
    [
        ([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], "noise"),
        # One image of 597 in every seed: no spread, and still no result.
        ([1 - 1 / 597] * 3, [1.0] * 3, "noise"),
        ([1 - 5 / 597] * 3, [1.0] * 3, "lower"),
        # Two standard errors are not much with three seeds.
        ([0.98, 0.97, 0.99], [0.965, 0.968, 0.970], "noise"),
        ([0.98], [0.9], "one seed"),
    ],
)
def test_verdicts(mine: list[float], others: list[float], verdict: str) -> None:
    assert words.difference(mine, others, 597).verdict == verdict


def test_differences_are_paired() -> None:
    d = words.difference([0.91, 0.96, 0.99], [0.90, 0.95, 0.98], 597)
    assert d.mean == pytest.approx(0.01)
    assert d.error == pytest.approx(0, abs=1e-9)


def test_cost_of_pruned_epochs_leaves_the_others_out(few_digits: demo.Digits) -> None:
    settings = demo.Settings(epochs=4, seeds=1)
    nobody = torch.ones(120, dtype=torch.long)
    full = demo.Record("full", 0, nobody, nobody, [0.9] * 4, [1.0, 2.0, 4.0, 1.0], [1.0, 2.0, 3.0, 4.0])
    half = replace(full, method="random", seconds=[9.0, 1.0, 3.0, 9.0], flops=[1.0, 1.5, 2.0, 3.0])
    summary = words.summarise([full, half, replace(half, method="pfb")], settings, few_digits)
    random = summary.methods["random"]
    assert random.flops == pytest.approx((0.5, 0.75))
    assert random.seconds_ratio == pytest.approx((0.5625, 0.625, 0.6875))
