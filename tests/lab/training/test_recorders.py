"""What a training records for coresets: the same as a slow loop finds, and the same after an interruption."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.coresets import Dynamics
from halfway.lab.training import recorders
from halfway.lab.training.loop import Training
from halfway.lab.training.trainable import check_trainable
from tests.helpers.small_training import CPU, load, same, trained
from tests.helpers.subsets import opened, stopped, tiny


def test_dynamics_are_those_of_every_presentation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    observe = recorders.DynamicsRecorder.observe

    def spy(self: recorders.DynamicsRecorder, ids: Tensor, outputs: Tensor, y: Tensor) -> None:
        seen.append((ids.clone(), outputs.clone(), y.clone()))
        observe(self, ids, outputs, y)

    monkeypatch.setattr(recorders.DynamicsRecorder, "observe", spy)
    recipe = tiny(method="full", record="dynamics")
    folder = opened(tmp_path / "run", recipe)
    training = Training(recipe, load(recipe), CPU, folder, show=False)
    assert training.run()
    assert len(seen) == training.steps == 20
    state = folder.load()
    assert state is not None
    found = Dynamics.of(state["recorded"])
    margins: dict[int, list[float]] = {}
    for ids, outputs, y in seen:
        for id, logits, label in zip(ids.tolist(), outputs.double().tolist(), y.tolist(), strict=True):
            others = [logit for c, logit in enumerate(logits) if c != label]
            margins.setdefault(id, []).append(logits[label] - max(others))
    for id, course in margins.items():
        assert found.presentations_N[id] == len(course) == 4
        assert found.margins_N[id].item() == pytest.approx(sum(course) / len(course), abs=1e-4)
        right = [margin > 0 for margin in course]
        assert found.forgotten_N[id] == sum(a and not b for a, b in itertools.pairwise(right))
        assert bool(found.learned_N[id]) == any(right)


def test_recording_changes_nothing_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    recipe = tiny(method="full", record="dynamics")
    plain = opened(tmp_path / "plain", tiny(method="full"))
    whole, resumed = (opened(tmp_path / name, recipe) for name in ("whole", "resumed"))
    trained(tiny(method="full"), plain)
    trained(recipe, whole)
    stopped(recipe, resumed, 7)
    trained(recipe, resumed)
    unrecorded, state, again = plain.load(), whole.load(), resumed.load()
    assert unrecorded is not None
    assert state is not None
    assert again is not None
    assert "recorded" not in unrecorded
    assert same(unrecorded["model"], state["model"])
    assert same(state["model"], again["model"])
    assert same(state["recorded"], again["recorded"])


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_run(tmp_path: Path) -> None:
    early = trained(tiny(method="full", stop_after=0.35))
    recipe = tiny(method="full")
    whole = stopped(recipe, opened(tmp_path / "whole", recipe), 7)
    assert early.step == early.steps == 7
    assert same(early.model.state_dict(), whole.model.state_dict())
    assert early.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=r"stop_after must be in \(0, 1\], got 0"):
        tiny(stop_after=0.0)


def test_checkpoints_are_evenly_spread_with_the_learning_rate_of_the_step_to_come(tmp_path: Path) -> None:
    recipe = tiny(method="full", record="checkpoints")
    folder = opened(tmp_path / "run", recipe)
    training = Training(recipe, load(recipe), CPU, folder, show=False)
    assert training.run()
    points = [torch.load(path, weights_only=True) for path in sorted((folder.path / "points").iterdir())]
    assert [point["step"] for point in points] == list(range(1, 20, 2))
    plain = tiny(method="full")
    early = stopped(plain, opened(tmp_path / "early", plain), 7)
    assert same(points[3]["model"], early.model.state_dict())
    policy = torch.optim.lr_scheduler.OneCycleLR(
        optimizer := torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], recipe.optimizer.lr, momentum=0.9),
        recipe.optimizer.lr,
        total_steps=20,
    )
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        policy.step()
    assert [point["lr"] for point in points] == pytest.approx(rates[1::2])


def test_what_was_there_before_is_the_same_run_as_ever() -> None:
    assert not {"stop_after", "record", "coreset"} & {key.split(".")[0] for key in tiny().identity()}
    assert tiny(stop_after=0.5).identity()["stop_after"] == 0.5


def test_dynamics_need_every_sample_of_a_batch() -> None:
    with pytest.raises(ValueError, match="method=full"):
        check_trainable(tiny(method="random", prune_ratio=0.5, record="dynamics"))
