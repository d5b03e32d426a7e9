"""What a round reports: the share of small losses, the scores, and that looking changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab.models import small as nets
from halfway.lab.recipes.schema import Recipe
from halfway.lab.training import loop, tasks
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.small_training import CPU, load, same, small, trained


def rounds(recipe: Recipe, path: Path) -> tuple[Training, list[dict[str, Any]]]:
    """A training in a folder, and its metrics."""
    folder = RunFolder(path)
    folder.open(recipe, resume=False)
    training = trained(recipe, folder)
    return training, folder.read_metrics()


def test_small_losses_are_those_of_the_samples_that_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rate of almost nothing: the model stays as it is, and a second one sees the same losses.
    recipe = small(method="full", length=1, label_smoothing=0.1, **{"optimizer.lr": 1e-30})
    monkeypatch.setattr(loop, "SMALL_LOSS", 2.3)
    training, (metrics,) = rounds(recipe, tmp_path / "run")
    model = nets.build(recipe.model.name, 10, recipe.model.options, None, recipe.seed, 16).train()
    shares = []
    for x, y, _ in training.data.train.batches(training.order.epoch(0)):
        logits = model(tasks.laid_out(x, recipe)).double()
        losses = [float((z.logsumexp(0) - z[t]).detach()) for z, t in zip(logits, y.tolist(), strict=True)]
        shares.append(sum(loss < 2.3 for loss in losses) / len(losses))
    assert 0.1 < sum(shares) / len(shares) < 0.9
    assert metrics["small_losses"] == pytest.approx(sum(shares) / len(shares), abs=1e-6)


def test_looking_at_the_model_changes_nothing_in_it(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"prune_ratio": 0.5, "evaluate_every": 1}
    plain, before = rounds(small(**changes), tmp_path / "plain")
    looked, after = rounds(small(batch_norm_samples=96, training_score=100, **changes), tmp_path / "looked")
    assert same(plain.model.state_dict(), looked.model.state_dict())
    assert [m["loss"] for m in before] == [m["loss"] for m in after]
    assert [m["test_loss"] for m in before] != [m["test_loss"] for m in after], "with other statistics"
    assert "training_score" not in before[-1]


def test_the_training_score_is_that_of_training_images_at_the_end(tmp_path: Path) -> None:
    recipe = small(training_score=100, evaluation_batch=50, method="full")
    training, metrics = rounds(recipe, tmp_path / "run")
    assert [("training_score" in m) for m in metrics] == [False, False, False, True]
    model, data = training.model.eval(), load(recipe)
    wrong = total = small_ones = 0.0
    ((x, y),) = data.trained_on.batches(1000)
    with torch.no_grad():
        for picture, label in zip(x[:100], y[:100].tolist(), strict=True):
            z = model(tasks.laid_out(picture.unsqueeze(0), recipe))[0].double()
            loss = float(z.logsumexp(0) - z[label])
            wrong, total, small_ones = wrong + (int(z.argmax()) != label), total + loss, small_ones + (loss < 0.1)
    last = metrics[-1]
    assert last["training_score"] == pytest.approx(100 - wrong)
    assert last["training_loss"] == pytest.approx(total / 100, rel=1e-4)
    assert last["training_small_losses"] == pytest.approx(small_ones / 100, abs=0.011)
    found = training.task.evaluate(model, data.test, CPU)
    assert (last["score"], last["test_loss"]) == (found.score, pytest.approx(found.loss))
