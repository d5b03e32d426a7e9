"""`halfway irreducible`: every image is scored by a model that was not trained on it, nothing is trained twice, and the
file says what it cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.engine.flops import FlopCounter
from halfway.lab import data
from halfway.lab.cli import main
from halfway.lab.data.base import IMAGENET
from halfway.lab.data.sources import Arrays, DatasetSources
from halfway.lab.models import small as nets
from halfway.lab.recipes.predicted_cost import sample_flops
from halfway.lab.training import session
from halfway.lab.training.cross_fitting import centred
from halfway.lab.training.irreducible import Scoring, losses_of
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from tests.helpers import processes
from tests.helpers.small_training import CPU, SETTINGS, load, same, small, trained, without_times

WHOLE = 160 // 32 * 32 * 4  # samples of a run of the small recipe on all data


def words(out: Path, *more: str) -> list[str]:
    return ["irreducible", "tiny-cifar10", "--data", "synthetic", "--out", str(out), *SETTINGS, *more]


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / "losses.pt", weights_only=True)
    return found


def raw(made: dict[str, Any]) -> Tensor:
    """The losses before they were centred."""
    overall = (made["folds"].bincount() * made["fold_means"]).sum() / len(made["folds"])
    return (made["losses"] + made["fold_means"][made["folds"]] - overall).float()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("irreducible") / "two"
    # Evaluated once, at the end: the losses are those of the checkpoint.
    assert main(words(out, "evaluate_every=4")) == 0
    return out


def test_each_loss_is_that_of_the_other_folds_model_plain_and_not_augmented(fitted: Path) -> None:
    made = read(fitted)
    recipe = small(**{"data.augment": "none"})
    assert recipe.label_smoothing > 0
    x, y, _ = next(iter(load(recipe).train.batches([(torch.arange(160), 0)])))
    assert torch.equal(y.bincount(made["folds"].double()), y.bincount() / 2)  # 16 of a class, 8 in each fold
    expected = torch.empty(160)
    for fold in (0, 1):
        state = RunFolder(fitted / f"fold-{fold}").load()
        assert state is not None
        model = nets.build(recipe.model.name, 10, recipe.model.options, None, 0)
        model.load_state_dict(state["model"])
        model.eval()
        mine = made["folds"] == fold
        with torch.no_grad():
            expected[mine] = F.cross_entropy(model(x[mine]), y[mine], reduction="none")
    assert torch.allclose(raw(made), expected, atol=1e-4)


def test_folds_are_made_comparable_and_the_mean_stays() -> None:
    losses, folds = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]), torch.tensor([0, 0, 1, 1, 1])
    found = centred(losses, folds, torch.tensor([2.0, 7.0], dtype=torch.float64))
    assert found.tolist() == [4.0, 6.0, 3.0, 5.0, 7.0]


def test_the_file_is_centred_and_says_what_it_was_made_from(fitted: Path) -> None:
    made = read(fitted)
    means = [made["losses"][made["folds"] == fold].mean().item() for fold in (0, 1)]
    assert means[0] == pytest.approx(means[1], abs=1e-5)
    assert made["losses"].mean().item() == pytest.approx(made["fold_means"].mean().item(), abs=1e-5)
    source = made["made_from"]
    assert (made["recipe"], made["holdout"], source["folds"], source["seeds"]) == ("tiny-cifar10", True, 2, [0, 0])
    assert source["settings"]["data"]["train_samples"] == 160
    assert source["versions"]["torch"] == torch.__version__


def test_a_net_that_knows_its_own_images_by_heart_does_not_know_those_it_is_scored_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise with labels that mean nothing: a model knows only what it was trained on, copies of it included."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 3, 8, 8), generator=random, dtype=torch.uint8).repeat(2, 1, 1, 1)
    source = Arrays(pixels, torch.randint(0, 10, (40,), generator=random).repeat(2))
    noise = data.DataSet(
        "noise",
        "classification",
        lambda *_: DatasetSources("noise", list("abcdefghij"), source, source),
        None,
        IMAGENET,
    )
    monkeypatch.setitem(data.SETS, "digits", noise)
    small_net = ["model.options={width: 16, blocks: [1, 1, 1, 1]}", "data.size=[8, 8]", "data.augment=none"]
    short = ["batch_size=20", "length=30", "evaluate_every=30"]
    assert main(["irreducible", "digits", "--out", str(tmp_path / "noise"), *small_net, *short]) == 0
    made = read(tmp_path / "noise")
    assert raw(made).mean() > math.log(10)
    last = RunFolder(tmp_path / "noise" / "fold-0").read_metrics()[-1]
    assert last["loss"] < 0.2


def test_the_moment_of_the_lowest_mean_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = small(method="full", **{"data.fold": [0, 2]})
    held_out = load(recipe).held_out
    assert held_out is not None
    means = iter([2.0, 1.0, math.nan, 3.0, 1.0])
    monkeypatch.setattr("halfway.lab.training.irreducible.losses_of", lambda *_: torch.full((80,), next(means)))
    tmp_path.mkdir(exist_ok=True)
    scoring = Scoring(recipe, held_out, CPU, RunFolder(tmp_path))
    model = torch.nn.Identity()
    for step in (1, 2):
        scoring(model, step)
    again = Scoring(recipe, held_out, CPU, RunFolder(tmp_path))  # as a resumed run does
    for step in (3, 4, 5):
        again(model, step)
    kept = torch.load(tmp_path / "held_out.pt", weights_only=True)
    assert (kept["mean"], kept["step"], kept["of"]) == (1.0, 2, 160)
    assert torch.equal(kept["ids"], held_out.ids)


def test_scoring_leaves_no_trace_in_the_training() -> None:
    recipe = small(method="full", **{"data.fold": [0, 2]})
    scored = trained(recipe)
    loaded = load(recipe)
    without = dataclasses.replace(loaded, held_out=None)
    alone = Training(recipe, without, CPU, show=False)
    assert alone.run()
    assert scored.scoring is not None
    assert alone.scoring is None
    assert same(scored.model.state_dict(), alone.model.state_dict())


def test_losses_are_those_in_eval_mode_and_the_mode_comes_back() -> None:
    recipe = small()
    images = load(small(**{"data.augment": "none"})).train
    model = nets.build(recipe.model.name, 10, recipe.model.options, None, 0).train()
    found = losses_of(model, images, recipe, CPU)
    assert model.training
    x, y, _ = next(iter(images.batches([(torch.arange(160), 0)])))
    assert recipe.label_smoothing > 0, "which is left out"
    assert torch.allclose(found, F.cross_entropy(model.eval()(x), y, reduction="none"), atol=1e-5)


def _losses(rank: int) -> Tensor:
    recipe = small(**{"data.augment": "none", "data.train_samples": 33})
    model = nets.build(recipe.model.name, 10, recipe.model.options, None, 0)
    return losses_of(model, load(recipe).train, recipe, CPU)


def test_two_ranks_share_the_scoring_and_both_know_all_losses() -> None:
    alone, (first, second) = _losses(0), processes.run(2, _losses)
    assert torch.equal(first, second)
    assert torch.allclose(first, alone, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- costs


def test_the_flops_of_a_sample_are_those_that_run() -> None:
    recipe = small()
    model = nets.build(recipe.model.name, 10, recipe.model.options, None, 0)
    with FlopCounter() as forward:
        out = model(torch.zeros(4, 3, 16, 16))
    with FlopCounter() as backward:
        out.sum().backward()
    flops = sample_flops(recipe)
    assert flops.forward == forward.total / 4
    assert flops.step == pytest.approx((forward.total + backward.total) / 4)


def test_the_cost_is_that_of_the_folds_training_and_scoring_in_runs_of_the_recipes_own_network(fitted: Path) -> None:
    cost, proxy = read(fitted)["cost"], sample_flops(small())
    recipe = sample_flops(small(**{"model.options": {"width": 16, "blocks": [1, 1, 1, 1]}}))
    # 80 images are two batches of 32: 4 epochs of 64 samples, and 80 images scored once.
    fold = 4 * 64 * proxy.step + 80 * proxy.forward
    assert cost["folds"] == pytest.approx([fold / (WHOLE * recipe.step)] * 2)
    assert cost["runs"] == pytest.approx(sum(cost["folds"]))
    assert cost["flops"] == pytest.approx(2 * fold)
    assert recipe.step > 3 * proxy.step


# ---------------------------------------------------------------------------------------------- going on, and errors


def test_nothing_is_trained_twice_and_a_lost_fold_comes_back_the_same(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    shutil.copytree(fitted, out)
    shutil.rmtree(out / "fold-1")
    (out / "losses.pt").unlink()
    before = (out / "fold-0" / "last.pt").stat().st_mtime_ns
    capsys.readouterr()
    assert main(words(out, "evaluate_every=4")) == 0
    said = capsys.readouterr().out
    assert "2 folds, 1 of them trained already" in said
    assert "\nfold-1: " in said
    assert "\nfold-0: " not in said
    assert (out / "fold-0" / "last.pt").stat().st_mtime_ns == before
    assert torch.equal(read(out)["losses"], read(fitted)["losses"])


def test_a_command_stopped_in_the_second_fold_goes_on_to_the_same_losses(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "stopped", iter(range(100))

    @contextlib.contextmanager
    def interruptible() -> Iterator[Any]:
        yield lambda: next(asked) == 7  # asked after each step that ends no epoch: four in a fold

    with monkeypatch.context() as patch:
        patch.setattr(session, "_interruptible", interruptible)
        assert main(words(out, "evaluate_every=4")) == 130
    assert "stopped; to go on: halfway" in capsys.readouterr().out
    assert (out / "fold-1" / "last.pt").exists()
    assert not (out / "losses.pt").exists()
    assert main(words(out, "evaluate_every=4")) == 0
    assert torch.equal(read(out)["losses"], read(fitted)["losses"])


def test_a_command_killed_between_scores_and_checkpoint_goes_on_to_the_same_losses_and_cost(
    fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save = tmp_path / "killed", RunFolder.save

    def killed(folder: RunFolder, state: dict[str, Any]) -> None:
        if state["finished"]:
            raise KeyboardInterrupt
        save(folder, state)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", killed)
        assert main(words(out, "evaluate_every=4")) == 130
    assert (out / "fold-0" / "held_out.pt").exists()
    assert main(words(out, "evaluate_every=4")) == 0
    assert torch.equal(read(out)["losses"], read(fitted)["losses"])
    assert read(out)["cost"] == read(fitted)["cost"]
    metrics = [without_times(RunFolder(path / "fold-0").read_metrics()) for path in (out, fitted)]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--folds", "1"], "--folds must be at least 2"),
        (["data.holdout=true"], "leave data.holdout and data.fold alone"),
        (["method=random"], "drop method="),
        (["batch_size=100"], "batch_size=100 is more than the 80 training images"),
    ],
)
def test_what_cannot_work_is_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path / "none", *more)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "none" / "losses.pt").exists()


def test_other_settings_and_lost_scores_are_refused_in_a_folder_that_holds_folds(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(fitted, "evaluate_every=4", "--seed", "1")) == 2
    assert "holds another run (seed was 0, is 1)" in capsys.readouterr().err
    out = tmp_path / "lost"
    shutil.copytree(fitted, out)
    (out / "fold-1" / "held_out.pt").unlink()
    assert main(words(out, "evaluate_every=4")) == 2
    assert "held_out.pt is gone" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- users


def test_rho_reads_the_file_and_compare_says_what_it_cost(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fitted / "losses.pt"
    out = tmp_path / "compared"
    words = ["compare", "tiny-cifar10", "--data", "synthetic", "--out", str(out), *SETTINGS, f"rho.losses={file}"]
    assert main([*words, "--methods", "full,rho", "--ratios", "0.5", "--seeds", "0", "--rounds", "0"]) == 0
    said = capsys.readouterr().out
    (entry,) = json.loads((out / "results.json").read_text())["prepared"]
    flops = sample_flops(small())  # what is compared here is as small as the proxy
    cost = read(fitted)["cost"]["flops"] / (WHOLE * flops.step)
    assert entry["cost"] == pytest.approx(cost)
    # Two of four epochs prune half of the samples, which pay for their forward pass.
    saved = 0.5 * 0.5 * (1 - flops.forward / flops.step)
    assert entry["pays_after"] == math.ceil(cost / saved)
    line = f"{file} cost as much as {cost:.2f} runs on full data"
    assert line in said
    assert line in (out / "table.md").read_text()
    assert f"cheaper than full data when {entry['pays_after']} runs share it" in said
