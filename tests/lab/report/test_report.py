"""`halfway report`: small real comparisons on synthetic pictures, honest sentences, and the page in a browser."""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab import data, report
from halfway.lab.cli import main
from halfway.lab.commands import report as report_command
from halfway.lab.comparison import run as comparison
from halfway.lab.comparison import table, trials
from halfway.lab.comparison.results import note_plan, summarise
from halfway.lab.comparison.results import write as write_results
from halfway.lab.comparison.trials import Group, group_of
from halfway.lab.comparison.verdict import headline, reading
from halfway.lab.recipes import schema as recipes
from halfway.lab.recipes.schema import Recipe
from halfway.lab.report import centroids as report_centroids
from halfway.lab.report import counts as report_counts
from halfway.lab.report import gallery as report_gallery
from halfway.lab.report import method as report_method
from halfway.lab.report import page, scatter
from halfway.lab.report import plots as report_plots
from halfway.lab.report import runs as report_runs
from halfway.lab.report.runs import Runs
from halfway.lab.training import session
from halfway.lab.training.run_folder import RunFolder
from halfway.lab.training.run_result import RunResult
from tests.lab.comparison.test_table import result

CPU = torch.device("cpu")
COMMAND = "halfway compare tiny-cifar10 --data synthetic"


def tiny(**changes: Any) -> Recipe:
    return recipes.load("tiny-cifar10").with_settings(
        {
            "root": "synthetic",
            "data.train_samples": 256,
            "data.test_samples": 100,
            "model.options.width": 8,
            "batch_size": 32,
            "length": 4,
            "window": [1, 3],
            "evaluate_every": 2,
            **changes,
        }
    )


def train(folder: Path, recipe: Recipe, methods: Sequence[str], ratios: Sequence[float], **over: Sequence[Any]) -> Path:
    keys = {key.replace("__", "."): values for key, values in over.items()}
    plan = trials.plan(recipe, methods, ratios, [0, 1], keys)
    assert comparison.train_all(plan, folder, CPU, COMMAND)
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """full, random and pfb at two ratios and two seeds; one run more that was never finished; a timing."""
    folder = train(tmp_path_factory.mktemp("runs") / "compared", tiny(), ["full", "random", "pfb"], [0.5, 0.7])
    never = RunFolder(folder / "random-0.5-s7")
    never.open(tiny(method="random", prune_ratio=0.5, seed=7), resume=False)
    never.note_session({"command": "halfway train tiny-cifar10 --seed 7", "steps": 32, "data": ""})
    steps = {label: {"median": 0.617, "q1": 0.6, "q3": 0.64, "rounds": 5} for label in ("full", "pfb, p = 0.5")}
    (folder / "timing.json").write_text(json.dumps({"steps": steps, "threads": 1}))
    return folder


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "swept"
    recipe = tiny(length=2, window=[1, 2])
    return train(folder, recipe, ["full", "random", "pfb"], [0.5], density__noise=[0.001, 0.01, 1])


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that counts steps, whose samples have several classes each."""
    recipe = recipes.load("tiny-voc").with_settings(
        {
            "root": "synthetic",
            "data.train_samples": 64,
            "data.test_samples": 8,
            "data.size": [48, 48],
            "model.options": {"width": 8, "blocks": [1, 1, 1, 1], "head_width": 16},
            "batch_size": 8,
            "length": 12,
            "window": [8, 11],
            "log_every": 4,
            "evaluate_every": 1,
            "multi_scale": [1.0],
            "density.num_centroids": 16,
        }
    )
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "voc")
    assert session.train(recipe, data.load(recipe.data, recipe.root), CPU, folder, False, "halfway train tiny-voc")
    return folder.path


def parse(*options: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="halfway")
    report_command.register(parser.add_subparsers())
    return parser.parse_args(["report", *map(str, options)])


def write(*options: str | Path) -> int:
    arguments = parse(*options)
    return arguments.run(arguments)


@pytest.fixture(scope="module")
def written(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "compared.html"
    assert write(compared, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def text(written: Path) -> str:
    return plain(written)


def plain(path: Path) -> str:
    """A page's words, as one reads them."""
    found = re.sub(r"<(style|script)>.*?</\1>", " ", path.read_text(), flags=re.S)
    found = re.sub(r"</?(b|code|em|small|span)\b[^>]*>", "", found)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", found)))


# --------------------------------------------------------------------- the page


def test_the_page_is_one_file_that_needs_nothing_from_outside(written: Path) -> None:
    content = written.read_text()
    assert content.startswith("<!doctype html>")
    sources = re.findall(r"""(?:src|href|srcset)\s*=\s*["']([^"']*)""", content)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script src|<link", content)
    assert content.count("<script") == 1
    assert [p.name for p in written.parent.iterdir()] == [written.name], "no temporary file is left"
    assert len(content) < 3_000_000


def test_the_page_forbids_all_that_it_does_not_use(written: Path) -> None:
    content = written.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', content)
    assert policy is not None
    assert policy.start() < content.index("<title>"), "it holds for what comes behind it"
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{script_hash(content)}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def script_hash(content: str) -> str:
    script = re.search(r"<script>(.*?)</script>", content, flags=re.S)
    assert script is not None
    return base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()


def test_all_images_have_a_description(written: Path) -> None:
    images = re.findall(r"<img [^>]*>", written.read_text())
    assert all(re.search(r'alt="[^"]{3,}"', image) for image in images)
    galleries, centroids = 2 * report_gallery.GALLERY, report_gallery.CENTROIDS * report_gallery.NEAREST
    assert sum("data:image/svg" not in image for image in images) == galleries + centroids


def test_every_number_of_the_table_is_on_the_page(compared: Path, text: str) -> None:
    runs = report_runs.read([compared])
    rows = summarise(runs.groups, runs.timing["steps"])
    assert len(rows) == 5
    for row in rows:
        for cell in table.cells(row):
            assert page.minus(cell) in text
    assert page.minus(table.notes(rows, runs.recipe, runs.session, runs.timing)) in text
    assert "0.62 [0.60, 0.64]" in text, "the comparison's timing is read"
    assert headline(rows) in text
    for sentence in reading(rows):
        assert page.minus(sentence) in text, "the words of the table, and no others"


def test_a_column_that_nobody_measured_is_left_out(swept: Path, tmp_path: Path) -> None:
    write(swept, "--out", tmp_path / "a.html")
    assert "wall" not in re.findall(r"<thead>.*?</thead>", (tmp_path / "a.html").read_text())[0]


def test_an_unfinished_run_is_listed_with_what_to_do(text: str, compared: Path) -> None:
    assert "left out of all that follows: random-0.5-s7 (not a round yet)" in text
    assert "halfway train tiny-cifar10 --seed 7 --resume" in text
    runs = report_runs.read([compared])
    assert sum(map(len, runs.groups.values())) == 10


def test_the_page_tells_how_to_repeat_it_and_no_machine_paths(text: str, written: Path, compared: Path) -> None:
    assert COMMAND in text
    assert torch.__version__ in text
    assert "pfb-0.5-s0" in text
    assert str(compared.parent) not in written.read_text()
    assert "epochs 2 to 3; PFB at layer1" in text


def test_the_command_to_repeat_a_run_gives_the_same_recipe(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from halfway.lab.commands.train import add_recipe_options, read_recipe

    run = RunResult.read(compared / "pfb-0.7-s1")
    words = shlex.split(report_method.repeat_command(run))
    parser = argparse.ArgumentParser()
    add_recipe_options(parser)
    for option in ("--method", "--prune-ratio", "--seed"):
        parser.add_argument(option)
    parsed, rest = parser.parse_known_args(words[2:])
    parsed.settings += rest
    again = read_recipe(parsed).with_settings(
        {"method": parsed.method, "prune_ratio": float(parsed.prune_ratio), "seed": int(parsed.seed)}
    )
    assert again == run.recipe


def test_the_galleries_hold_the_extremes_of_retention(written: Path, compared: Path) -> None:
    offered, retained = torch.zeros(256), torch.zeros(256)
    for seed in (0, 1):
        state = RunFolder(compared / f"pfb-0.5-s{seed}").load()
        assert state is not None
        offered += state["retention"]["offered"]
        retained += state["retention"]["retained"]
    rates = sorted(round(100 * float(r)) for r in (retained / offered)[offered > 0])
    shown = [int(r) for r in re.findall(r"retained in (\d+)\s% \(", written.read_text())]
    assert shown[: report_gallery.GALLERY] == rates[: report_gallery.GALLERY]
    assert shown[report_gallery.GALLERY :] == rates[::-1][: report_gallery.GALLERY]


def test_segmentation_runs_have_a_page_too(segmented: Path) -> None:
    assert write(segmented) == 0
    text = plain(segmented / "report.html")
    assert "mean intersection over union" in text
    assert "Pruned most often" in text
    assert "What the density is made of" in text
    assert "steps 9 to 11; PFB at backbone.layer3" in text
    assert "PFB at p = 0.5: " in text, "a single run has a headline as well"


def test_without_the_data_all_but_the_pictures_is_there(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(compared, "--data", tmp_path / "moved", "--out", tmp_path / "a.html") == 0
    content = (tmp_path / "a.html").read_text()
    assert str(tmp_path) not in content
    assert "The data set was not found when this page was written" in content
    assert content.count("<figure>") == 5
    assert "airplane" in html.unescape(content), "the classes' names are known without the data"
    assert str(tmp_path / "moved") in capsys.readouterr().err, "whoever runs it is told where it was looked for"


def test_data_of_another_size_are_not_mistaken_for_the_runs_own() -> None:
    pictures = report.load_pictures(tiny(), None, 300)
    assert pictures.data is None
    assert "256 training samples, but the runs saw 300" in pictures.reason


def test_every_row_has_a_dot_with_n_and_interval(written: Path, compared: Path) -> None:
    content = html.unescape(written.read_text())
    for row in report_runs.read([compared]).rows:
        dot = re.search(rf'<g class="point"[^>]*data-label="{row.group.label}".*?</title>', content, flags=re.S)
        assert dot is not None
        assert f"(n = {len(row.scores)}) at {row.cost:.3f} of the FLOPs" in dot[0]
        for d in (row.minus_full, row.minus_random):
            assert d is None or page.minus(str(d)) in dot[0]
    assert content.count('<line class="curve"') == 2, "through random pruning at both ratios and full data"


def test_full_data_for_fewer_epochs_have_a_curve_of_their_own() -> None:
    groups: Any = {
        group_of("full", None, {}): {0: result("full", 0.0, 0, 90.0)},
        group_of("full", None, {"length": 6}): {0: result("full", 0.0, 0, 85.0, seen=600, spent=600.0, retained=600)},
        group_of("pfb", 0.5, {}): {0: result("pfb", 0.5, 0, 80.0)},
    }
    plot = scatter.score_by_cost(summarise(groups, {}), "accuracy, %", "epoch")
    assert plot["titles"] == {"full": "full data for fewer epochs"}
    assert [len(curve["pieces"]) for curve in plot["curves"]] == [1]
    assert [point["text"] for point in plot["points"]] == ["", "6 epochs", "p = 0.5"]


def test_of_a_comparison_without_its_runs_the_table_is_shown(compared: Path, tmp_path: Path) -> None:
    runs = report_runs.read([compared])
    write_results(tmp_path, runs.rows, COMMAND, runs.groups, runs.timing)
    assert write(tmp_path) == 0
    text = plain(tmp_path / "report.html")
    for row in runs.rows:
        assert all(page.minus(cell) in text for cell in table.cells(row))
    assert headline(runs.rows) in text
    assert COMMAND in text
    assert "curves, retention and pictures need the run folders" in text


def test_names_and_values_are_escaped(compared: Path, tmp_path: Path) -> None:
    runs = report_runs.read([compared])
    write_results(tmp_path, runs.rows, "halfway compare <b>&</b>", runs.groups, runs.timing)
    content = json.loads((tmp_path / "results.json").read_text())
    content["recipe"]["title"] = "<script>alert(1)</script>"
    content["rows"][0]["group"]["settings"] = [["data.name", '"><img src=x>']]
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert write(tmp_path) == 0
    page_text = (tmp_path / "report.html").read_text()
    assert page_text.count("<script") == 1
    assert "<img" not in page_text
    assert "<b>&</b>" not in page_text
    content["rows"][0]["group"]["method"] = "full;}</style>"
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="unknown method"):
        write(tmp_path)


def test_a_title_replaces_the_recipes_name(compared: Path, tmp_path: Path) -> None:
    write(compared / "pfb-0.5-s0", "--out", tmp_path / "a.html", "--title", "Mine <&> yours")
    content = (tmp_path / "a.html").read_text()
    assert '<p class="over">Mine &lt;&amp;&gt; yours</p>' in content


# --------------------------------------------------------------------- grouping


def test_groups_are_in_the_order_of_the_table(compared: Path) -> None:
    runs = report_runs.read([compared])
    expected = [("full", None), ("random", 0.5), ("random", 0.7), ("pfb", 0.5), ("pfb", 0.7)]
    assert [(g.method, g.ratio) for g in runs.groups] == expected
    assert all(list(seeds) == [0, 1] for seeds in runs.groups.values())
    assert runs.main == Group("pfb", 0.5)
    assert runs.sweep is None


def test_a_sweep_groups_by_the_setting_only_where_it_matters(swept: Path) -> None:
    runs = report_runs.read([swept])
    noise = [("pfb", 0.5, (("density.noise", value),)) for value in (0.001, 0.01, 1)]
    assert [(g.method, g.ratio, g.settings) for g in runs.groups] == [("full", None, ()), ("random", 0.5, ()), *noise]
    assert runs.sweep == "density.noise"
    assert runs.main == Group("pfb", 0.5, (("density.noise", 0.01),)), "the recipe's own value"
    plan = trials.plan(tiny(), ["full", "random", "pfb"], [0.5], [0, 1], {"density.noise": [0.001, 0.01, 1]})
    assert set(runs.groups) == {t.group for t in plan}, "the same groups as the comparison that trained them"


def test_a_sweep_is_drawn_against_its_setting(swept: Path, tmp_path: Path) -> None:
    write(swept, "--out", tmp_path / "a.html")
    content = (tmp_path / "a.html").read_text()
    assert "Score by density.noise" in content
    assert "density.noise = 0.001, 0.01, 1" in plain(tmp_path / "a.html")


def test_groups_are_those_that_compare_has_written_down(compared: Path, tmp_path: Path) -> None:
    """Two runs that differ in their seed only are two groups if the comparison says so; a run it does not know makes
    the report guess for all."""
    for name in ("pfb-0.5-s0", "pfb-0.5-s1"):
        shutil.copytree(compared / name, tmp_path / name)
    groups = [group_of("pfb", 0.5, {"optimizer.lr": value}) for value in (0.1, 0.2)]
    plan = [trials.Trial(group, 0, tiny()) for group in groups]
    for trial, name in zip(plan, ("pfb-0.5-s0", "pfb-0.5-s1"), strict=True):
        (tmp_path / name).rename(tmp_path / trial.folder)
    note_plan(tmp_path, plan, COMMAND)
    assert list(report_runs.read([tmp_path]).groups) == groups
    shutil.copytree(compared / "full-s0", tmp_path / "full-s0")
    assert list(report_runs.read([tmp_path]).groups) == [Group("full", None), Group("pfb", 0.5)]


def test_a_setting_left_at_its_default_is_the_same_as_the_default_given(compared: Path) -> None:
    run = RunResult.read(compared / "pfb-0.5-s0")
    other = RunResult(run.path, run.recipe.with_settings({"seed": 5, "density.beta": 0.01}), [], [], 0)
    assert list(report_runs.group_runs([run, other])) == [Group("pfb", 0.5)]


def test_folders_of_runs_and_runs_can_be_mixed_and_count_once(compared: Path) -> None:
    some = report_runs.find([compared / "pfb-0.5-s0", compared])
    assert len(some) == 11
    assert some[0] == compared / "pfb-0.5-s0"


def test_wall_times_are_found_under_both_spellings_of_a_number(compared: Path, tmp_path: Path) -> None:
    (tmp_path / "timing.json").write_text(json.dumps({"steps": {"pfb, p = 0.5, optimizer.lr=1": {"median": 0.5}}}))
    group = Group("pfb", 0.5, (("optimizer.lr", 1.0),))
    assert report_runs._timing([tmp_path], {group: {}})["steps"] == {group.label: {"median": 0.5}}


# ----------------------------------------------------------------------- errors


def test_runs_of_different_recipes_are_refused_by_name(compared: Path, segmented: Path) -> None:
    with pytest.raises(ValueError, match=r"different recipes.*tiny-cifar10, tiny-voc"):
        report_runs.read([compared, segmented])


def test_the_same_run_twice_is_refused_by_folder(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "full-s0", tmp_path / "copy")
    with pytest.raises(ValueError, match=r"full-s0 and .*copy are the same run"):
        report_runs.read([compared, tmp_path / "copy"])


def test_nothing_finished_is_an_error_that_says_how_to_go_on(compared: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to report yet.*--seed 7 --resume"):
        report_runs.read([compared / "random-0.5-s7"])


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a run folder"):
        report_runs.read([tmp_path])
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        report_runs.read([tmp_path / "nowhere"])


def test_synthetic_and_real_runs_are_not_mixed(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "full-s0", tmp_path / "real")
    config = tmp_path / "real" / "config.yaml"
    config.write_text(config.read_text().replace("root: synthetic", "root: data").replace("seed: 0", "seed: 9"))
    with pytest.raises(ValueError, match="synthetic pictures and others real data"):
        report_runs.read([compared, tmp_path / "real"])


def test_an_output_that_is_a_folder_is_refused(compared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        write(compared, "--out", tmp_path)


def test_a_missing_dependency_says_what_to_install(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(compared), "--out", str(tmp_path / "a.html")]) == 2
    assert "pip install '.[lab]' in a checkout" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------- sentences of real runs


def test_the_headline_stands_beside_what_was_trained(text: str) -> None:
    assert "A small ResNet on a fifth of CIFAR-10, 16 px · synthetic pictures in place of CIFAR-10" in text
    assert "· reduced scale" in text


# -------------------------------------------------------------------- retention


def test_counts_are_those_of_a_slow_loop(compared: Path) -> None:
    paths = [compared / f"pfb-0.5-s{seed}" for seed in (0, 1)]
    found = report_counts.read(paths)
    assert found is not None
    train = data.load(tiny().data, "synthetic").train
    labels = [train.label(i) for i in range(256)]
    states = [RunFolder(path).load() for path in paths]
    for i in range(256):
        offered = sum(int(s["retention"]["offered"][i]) for s in states if s)
        retained = sum(int(s["retention"]["retained"][i]) for s in states if s)
        assert (int(found.offered[i]), int(found.retained[i])) == (offered, retained)
    for c, name in enumerate(train.classes):
        members = [i for i in range(256) if labels[i] == name]
        offered, retained = (sum(int(n[i]) for i in members) for n in (found.offered, found.retained))
        assert float(found.class_rates[c]) == pytest.approx(retained / offered)
    assert found.share == pytest.approx(0.5)
    assert int(found.offered.sum()) == 2 * 2 * 256


def test_class_rates_over_time_leave_out_rounds_that_prune_nothing() -> None:
    offered = torch.tensor([[0, 0], [4, 2], [4, 2], [2, 4], [0, 0]])
    retained = torch.tensor([[0, 0], [1, 1], [2, 1], [2, 1], [0, 0]])
    counts = report_counts.Counts(torch.zeros(3), torch.zeros(3), offered, retained)
    rates, rounds = counts.class_rates_over_time(at_most=40)
    assert rates.tolist() == [[0.25, 0.5], [0.5, 0.5], [1.0, 0.25]]
    assert rounds.tolist() == [[2, 2], [3, 3], [4, 4]]
    rates, rounds = counts.class_rates_over_time(at_most=2)
    assert rates.tolist() == [[0.375, 0.5], [1.0, 0.25]]
    assert rounds.tolist() == [[2, 3], [4, 4]]


def test_extremes_leave_out_samples_never_offered_and_prefer_what_was_offered_more() -> None:
    offered, retained = torch.tensor([0, 4, 8, 4, 6]), torch.tensor([0, 0, 0, 4, 6])
    nobody = torch.zeros(0, 0)
    counts = report_counts.Counts(offered, retained, nobody, nobody)
    assert counts.extremes(2) == ([2, 1], [4, 3])
    assert counts.extremes(10) == ([2, 1, 4, 3], [4, 3, 2, 1])


def test_of_many_classes_both_ends_are_shown() -> None:
    rates = torch.arange(100).flip(0) / 100
    shown = report_plots.shown_classes(rates)
    assert len(shown) == 31
    assert shown[:2] == [99, 98]
    assert shown[15] is None
    assert shown[-1] == 0
    few = torch.tensor([0.5, float("nan"), 0.2])
    assert report_plots.shown_classes(few) == [2, 0], "a class that never occurred has no rate"


# -------------------------------------------------------------------- centroids


def test_nearest_samples_are_those_of_a_brute_force_search(compared: Path) -> None:
    folder = RunFolder(compared / "pfb-0.5-s0")
    recipe, state = recipes.load(str(folder.config)), folder.load()
    assert state is not None
    loaded = data.load(recipe.data, recipe.root)
    before = torch.random.get_rng_state()
    centroids, counts, x, ids = report_centroids.represent(recipe, state, loaded)
    found = report_centroids.heaviest(recipe, state, loaded, 16, 4)
    assert torch.equal(torch.random.get_rng_state(), before)
    stored = state["blocker"]["selector"]
    assert torch.equal(counts, stored["counts"])
    assert torch.equal(centroids, stored["centroids"][:, : stored["width"]])
    assert x.shape == (256, 8)
    assert ids.tolist() == list(range(256))
    assert [c.share for c in found] == sorted((c.share for c in found), reverse=True)
    heaviest = sorted(range(64), key=lambda c: -int(counts[c]))[:16]
    for c, centroid in zip(heaviest, found, strict=True):
        distances = [sum((float(a) - float(b)) ** 2 for a, b in zip(row, centroids[c], strict=True)) for row in x]
        assert centroid.nearest == sorted(range(256), key=lambda i: distances[i])[:4]
        assert centroid.share == pytest.approx(int(counts[c]) / int(counts.sum()))


def test_representations_are_the_models_features_at_the_cut(compared: Path) -> None:
    from halfway.lab.models import small as nets

    folder = RunFolder(compared / "pfb-0.5-s0")
    recipe, state = recipes.load(str(folder.config)), folder.load()
    assert state is not None
    loaded = data.load(recipe.data, recipe.root)
    _, _, x, ids = report_centroids.represent(recipe, state, loaded)
    model = nets.build(recipe.model.name, 10, recipe.model.options, None, 0, 16).eval()
    model.load_state_dict(state["model"])
    features: list[torch.Tensor] = []
    model.get_submodule(recipe.cut).register_forward_hook(lambda *parts: features.append(parts[2]))
    plan = [(ids[:100], report_centroids.seed_of(0, 0))]
    model(next(iter(loaded.train.batches(plan)))[0])
    torch.testing.assert_close(x[:100], features[0].mean((2, 3)))


# ----------------------------------------------------------------------- colours


def test_further_methods_have_colours_of_their_own() -> None:
    methods = ["full", "random", "pfb", "divbs", "infobatch", "loss"]
    for theme in (page.LIGHT, page.DARK):
        colours = theme.colours(methods)
        assert len(set(colours.values())) == len(methods)
        assert colours["pfb"] == theme.known["pfb"]
        assert theme.colours(["divbs", "full"])["divbs"] == colours["divbs"]
    assert "--infobatch:" in page.method_style(methods)


# ----------------------------------------------------------------------- browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync "
    "disable-component-update"
)

# A frame has a window of its own: a browser's smallest window is wider than a telephone.
_FRAME = """<!doctype html><meta charset="utf-8"><title>waiting</title>
<iframe style="border:0; width:{width}px; height:9000px" srcdoc="{page}"></iframe>
<script>
document.querySelector("iframe").onload = event => {{
  const inside = event.target.contentDocument, images = [...inside.images];
  document.title = JSON.stringify({{
    images: images.length,
    broken: images.filter(image => !image.naturalWidth).length,
    swapped: images.filter(image => image.currentSrc !== image.src).length,
    width: inside.documentElement.scrollWidth,
    window: event.target.contentWindow.innerWidth,
    paper: event.target.contentWindow.getComputedStyle(inside.body).backgroundColor,
  }});
}};
</script>"""


def browse(path: Path, width: int, scheme: int, folder: Path) -> dict[str, Any]:
    """Open the page in a frame so wide; scheme: 0 is dark, 1 is light."""
    assert BROWSER is not None
    framed = folder / "framed.html"
    framed.write_text(_FRAME.format(width=width, page=html.escape(path.read_text())))
    done = subprocess.run(
        [
            BROWSER,
            *(f"--{flag}" for flag in _FLAGS.split()),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--window-size=1400,900",
            "--virtual-time-budget=20000",
            f"--screenshot={folder / 'seen.png'}",
            "--dump-dom",
            framed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    return json.loads(html.unescape(title[1]))


def console(path: Path, folder: Path) -> tuple[str, list[str]]:
    """The page's title after it has loaded, and what the browser's console says about it."""
    flags = [f"--{flag}" for flag in _FLAGS.split()]
    command = [str(BROWSER), *flags, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    return title[1], [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found")
def test_a_browser_finds_nothing_forbidden_on_the_page_and_runs_no_other_script(written: Path, tmp_path: Path) -> None:
    title, said = console(written, tmp_path)
    assert said == []
    smuggled = '<script>document.title = "ran"</script><img src="http://127.0.0.1:9/seen.png"></main>'
    (tmp_path / "smuggled.html").write_text(written.read_text().replace("</main>", smuggled))
    again, said = console(tmp_path / "smuggled.html", tmp_path)
    assert again == title
    assert sum("violates the following Content Security Policy" in line for line in said) == 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found")
def test_the_table_sorts_and_filters(written: Path, tmp_path: Path) -> None:
    """The page's own script, called by one more that the policy would forbid: it is taken out for this."""
    act = """<script>
    document.querySelectorAll("table.rows th button")[1].click();
    const now = [...document.querySelectorAll("table.rows tbody tr")];
    const scores = now.map(row => parseFloat(row.cells[1].textContent));
    filter.value = "PFB 0.7"; filter.oninput();
    points[0].onfocus();
    const shown = rows.filter(row => !row.hidden).map(row => row.dataset.label);
    const dim = points.filter(point => point.classList.contains("dim")).length;
    document.title = JSON.stringify({scores, shown, dim, tip: tip.textContent});
    </script></body>"""
    open_page = re.sub(r"<meta http-equiv[^>]*>", "", written.read_text()).replace("</body>", act)
    (tmp_path / "acted.html").write_text(open_page)
    title, said = console(tmp_path / "acted.html", tmp_path)
    assert said == []
    seen = json.loads(html.unescape(title))
    assert seen["scores"] == sorted(seen["scores"], reverse=True)
    assert seen["shown"] == ["pfb, p = 0.7"]
    assert seen["dim"] == 4
    assert "(n = 2) at 1.000 of the FLOPs" in seen["tip"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found")
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize(("scheme", "paper"), [(0, "rgb(28, 28, 26)"), (1, "rgb(251, 250, 247)")])
def test_a_browser_shows_every_image_and_nothing_sticks_out(
    written: Path, tmp_path: Path, width: int, scheme: int, paper: str
) -> None:
    seen = browse(written, width, scheme, tmp_path)
    assert seen["images"] == len(re.findall("<img ", written.read_text()))
    assert seen["broken"] == 0
    assert seen["window"] == width
    assert seen["width"] <= width
    assert seen["paper"] == paper, "the page is dark where the browser is"
    assert seen["swapped"] == (0 if scheme else written.read_text().count("<figure>")), "and so are its figures"


# ------------------------------------------------------------------ many methods


def test_of_many_methods_figures_with_a_line_each_show_the_best() -> None:
    """Full data, random and PFB at its ratio, and the best of the others; all of them where they are few."""
    scores = {"full": 90.0, "random": 50.0, "pfb": 40.0, "rotate": 80.0, "ucb": 10.0, "rs2": 70.0, "loss": 60.0}
    groups: Any = {}
    for method, score in scores.items():
        groups[group_of(method, 0.5, {})] = {0: result(method, 0.5, 0, score)}
    groups[group_of("random", 0.3, {})] = {0: result("random", 0.3, 0, 95.0)}
    shown = Runs(groups, [], {}).shown
    assert [group.label for group in shown] == [
        "full",
        *(f"{method}, p = 0.5" for method in ("random", "pfb", "rotate", "rs2", "loss")),
    ]
    few = {group: seeds for group, seeds in groups.items() if group.method in ("full", "random", "pfb", "ucb")}
    assert Runs(few, [], {}).shown == few
