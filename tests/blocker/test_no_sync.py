"""A steady step waits for nothing: it runs on fake tensors, which have no values to read (see `helpers.fake_device`).

What does wait, and may: the first batch, rehearsals and proofs, the filling of centroids, `set_epoch`, `stats`,
`state_dict`, parts of the batch that are no tensors or lie elsewhere (docs/compatibility.md has the list). These are
over when a program is moved to the fake device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfway
from halfway.engine import spot_checks
from halfway.engine.replay import Replayer
from halfway.selectors import SELECTORS
from tests.helpers.fake_device import DEVICE, Waits, on_the_device
from tests.helpers.waiting import NoWaiting

BATCH, CLASSES, SIDE = 16, 5, 32
SAMPLES = 2 * BATCH
NEED_IDS = [name for name, kind in SELECTORS.items() if kind.wants_ids != "no"]


def network(dropout: float = 0.0) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(dropout))
    return nn.Sequential(stem, nn.Conv2d(6, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))


def made(name: str, **settings: Any) -> halfway.Selector:
    """A selector that is steady after a few small batches."""
    if name == "proxy":
        settings |= {"model": nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, CLASSES)), "every": 1}
    if name.startswith("rho"):
        settings["losses"] = torch.rand(SAMPLES)
    known = inspect.signature(SELECTORS[name].__init__).parameters
    settings = {"num_centroids": 8, "num_samples": SAMPLES, "class_counts": [9] * CLASSES, **settings}
    return SELECTORS[name](**{key: value for key, value in settings.items() if key in known})


class Training:
    """A few real steps, until nothing is new; `step` takes one more."""

    def __init__(
        self, model: nn.Module, at: str | None, selector: halfway.Selector, autocast: bool = False, **settings: Any
    ) -> None:
        self.model, self.autocast = model.train(), autocast
        at = None if selector.needs == "outputs" else at
        self.blocker = halfway.ForwardBlocker(model, at, 0.5, selector=selector, **settings)
        self.optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self.batch = torch.randn(BATCH, 3, SIDE, SIDE), torch.arange(BATCH) % CLASSES, torch.arange(BATCH)
        for _ in range(4):
            self.step(torch.randn_like(self.batch[0]), *self.batch[1:])
        self.blocker._check()

    def step(self, x: Tensor, y: Tensor, ids: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            x, y = self.blocker(x, y, ids=ids)
            logits = self.model(x)
            losses = F.cross_entropy(logits.mean((2, 3)) if logits.ndim == 4 else logits, y, reduction="none")
        self.blocker.observe(losses)
        losses.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps_replayed(self) -> int:
        return self.blocker._counters.replayed_steps  # `stats` waits for the device

    def on_the_device(self, steps: int = 1) -> list[str]:
        """Take steps there. Returns what was copied from the host."""
        with on_the_device(self.model, self.blocker, self.optimizer, self.batch) as (device, (*_, batch)):
            for _ in range(steps):
                self.step(*batch)
        assert self.blocker.last is None or self.blocker.last.indices.device == DEVICE
        return device.uploads


# ------------------------------------------------------------------------------------------------ every selector


@pytest.mark.parametrize("name", SELECTORS)
def test_no_selector_waits_for_the_device(name: str) -> None:
    training = Training(network(), "0", made(name))
    before = training.steps_replayed()
    assert training.on_the_device(steps=2) == []
    assert training.steps_replayed() - before == (2 if training.blocker._engine is not None else 0)


@pytest.mark.parametrize("settings", [{"by": "weights"}, {"class_counts": None}])
def test_evening_out_classes_waits_for_nothing_in_any_way(settings: dict[str, Any]) -> None:
    assert Training(network(), "0", made("class_balanced", **settings)).on_the_device(steps=2) == []


@pytest.mark.parametrize("name", NEED_IDS)
def test_ids_on_the_host_are_copied_without_waiting_also_into_a_memory_that_grows(name: str) -> None:
    training = Training(network(), "0", made(name, num_samples=None))
    x, y, _ = training.batch
    with on_the_device(training.model, training.blocker, training.optimizer, x, y) as (device, (*_, x, y)):
        training.step(x, y, torch.tensor(list(range(BATCH, 2 * BATCH))))
    assert 0 < len(device.uploads) <= 8
    assert set(device.uploads) == {"aten._to_copy.default"}


# ------------------------------------------------------------------------------------------- models, circumstances


def resnet18() -> nn.Module:
    return pytest.importorskip("torchvision").models.resnet18(num_classes=CLASSES)


def swin() -> nn.Module:
    """Two stages of Swin, with shifted windows and drop path."""
    kinds = pytest.importorskip("torchvision").models.swin_transformer
    return kinds.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=CLASSES)


def vit(**options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", img_size=SIDE, num_classes=CLASSES, depth=3, **options)


def vit_with_dropout() -> nn.Module:
    return vit(drop_rate=0.1, proj_drop_rate=0.1, drop_path_rate=0.2)


def unet() -> nn.Module:
    kinds = pytest.importorskip("segmentation_models_pytorch")
    return kinds.Unet("resnet18", encoder_weights=None, classes=CLASSES)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a small CNN with dropout": (lambda: network(0.2), "0"),
    "ResNet-18": (resnet18, "layer1"),
    "ViT": (vit, "blocks.1"),
    "ViT with dropout": (vit_with_dropout, "blocks.1"),
    "Swin": (swin, "features.1"),
    "U-Net": (unet, "encoder.layer2"),
}


def density() -> halfway.Selector:
    return halfway.Density(num_centroids=8)


@pytest.mark.parametrize("name", MODELS)
def test_no_replayed_step_waits_for_the_device(name: str) -> None:
    make, at = MODELS[name]
    training = Training(make(), at, density())
    plan = training.blocker._engine._prover.last
    assert all(op.proven or op.computed for op in plan.ops if op.kind == "expensive")
    with NoWaiting():  # shortcuts for plain tensors, which fake ones do not take
        training.step(*training.batch)
    before = training.steps_replayed()
    assert training.on_the_device() == []
    assert training.steps_replayed() == before + 1


@pytest.mark.parametrize("name", ["ResNet-18", "ViT with dropout"])
def test_nor_does_a_step_that_is_checked(name: str) -> None:
    make, at = MODELS[name]
    training = Training(make(), at, density())
    engine = training.blocker._engine
    training.blocker._counters.steps = spot_checks.EVERY - 1
    engine._prober.probes = 255  # and everything that the model holds is looked at
    engine._checks._off.clear()
    assert training.on_the_device() == []
    assert len(engine._checks._off) == 2, "features and one operation"


@pytest.mark.parametrize("name", ["a small CNN with dropout", "ViT"])
@pytest.mark.parametrize(
    ("settings", "replayed"),
    [
        ({"reuse": "recompute"}, 0),
        ({"autocast": True}, 1),
        ({"schedule": halfway.Schedule(0, 4, unit="step")}, 0),  # over: the selector watches a full batch
    ],
    ids=["recompute", "autocast", "outside the schedule"],
)
def test_nor_does_any_other_step(name: str, settings: dict[str, Any], replayed: int) -> None:
    make, at = MODELS[name]
    training = Training(make(), at, density(), **settings)
    before = training.steps_replayed()
    assert training.on_the_device(steps=1) == []
    assert training.steps_replayed() == before + replayed


@pytest.mark.parametrize("name", ["early_exit", "balanced", "last_loss_proportional", "divbs"])
def test_nor_does_learning_from_a_full_batch_under_autocast(name: str) -> None:
    training = Training(network(), "0", made(name), autocast=True, schedule=halfway.Schedule(0, 4, unit="step"))
    assert training.on_the_device() == []


# ------------------------------------------------------------------------------------------------ it would be seen

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0, 0].item(),
    "bool": lambda t: bool((t > 0).any()),
    "float": lambda t: float(t.sum()),
    "tolist": lambda t: t.tolist(),
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: (t > 0).nonzero(),
    "a mask": lambda t: t[t > 0],
    "unique": lambda t: t.unique(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "copy_": lambda t: torch.zeros(t.shape).copy_(t),
    "Python's numbers": lambda t: torch.tensor([1.0, 2.0], device=t.device),
    "new_tensor": lambda t: t.new_tensor([1.0, 2.0]),
    "a blocking copy": lambda t: torch.zeros(3).to(t.device),
    "an index on the host": lambda t: t[torch.zeros(2, dtype=torch.int64)],
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_an_error(name: str) -> None:
    with on_the_device(torch.zeros(4, 3)) as (device, (t,)):
        with pytest.raises(Waits):
            WAITS[name](t)
        assert device.waits
        device.waits.clear()


def test_values_that_bypass_the_dispatcher_are_an_error_and_a_copy_that_nothing_waits_for_is_none() -> None:
    with on_the_device(torch.zeros(4, 3)) as (device, (t,)):
        with pytest.raises(RuntimeError, match="numpy"):
            t.numpy()
        with pytest.raises(RuntimeError, match="device"):
            t + torch.zeros(3)
        assert torch.zeros(3).to(t.device, non_blocking=True).device == DEVICE
        assert (t + torch.tensor(2.0)).device == DEVICE  # a number, not a copy
    assert device.uploads == ["aten._to_copy.default"]


def test_a_selector_that_reads_a_value_is_found() -> None:
    class Curious(halfway.Density):
        def learn(self, candidates: Any, retained: Any) -> None:
            self.seen = candidates.features.mean().item()
            super().learn(candidates, retained)

    training = Training(network(), "0", Curious(num_centroids=8))
    with pytest.raises(Waits, match="_local_scalar_dense"):
        training.on_the_device()


def test_a_replay_that_reads_a_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine takes the error for one of the model's, and computes instead."""
    training = Training(network(), "0", density())
    cut = Replayer._cut

    def curious(self: Replayer, entry: Any, op: Any) -> Any:
        bool(entry.outputs[0].isfinite().all())
        return cut(self, entry, op)

    monkeypatch.setattr(Replayer, "_cut", curious)
    with pytest.raises(AssertionError, match="is_nonzero"), pytest.warns(UserWarning, match="twice"):
        training.on_the_device()
