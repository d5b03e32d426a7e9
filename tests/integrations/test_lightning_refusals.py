"""The Lightning callback where it cannot work: it says so, before training where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from halfway.integrations.lightning import ForwardBlocking
from tests.helpers.lightning_modules import (
    RATIO,
    CallsTheNet,
    Module,
    NoForward,
    fit,
    stats_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")


class NeverTrained(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training began")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at": "net.zero"}, "no module 'net.zero' in this NeverTrained.*closest"),
        ({"at": "0", "model": "nets"}, "no module 'nets'"),
        ({"at": None}, "at= must name a layer"),
        ({"at": "net.0", "prune_ratio": 1.0}, "prune_ratio"),
    ],
)
def test_wrong_settings_are_found_before_training(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(NeverTrained(), ForwardBlocking(**{"prune_ratio": RATIO, **settings}))


def test_a_step_that_calls_another_model_says_which() -> None:
    module, blocking = CallsTheNet(), ForwardBlocking("net.0", RATIO)
    with pytest.raises(RuntimeError, match=r"to call self\(...\), but it calls self.net: pass model='net'"):
        fit(module, blocking)
    assert "training_step" not in vars(module)  # also after an error


class Several(NoForward):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


def test_without_a_cut_and_a_forward_it_must_be_said_which_model_is_called() -> None:
    with pytest.raises(ValueError, match=r"model= which of \['net', 'other'\]"):
        fit(Several(), ForwardBlocking(None, RATIO, selector="random"))
    for module in (Several(), NoForward()):
        model = "net" if isinstance(module, Several) else None
        blocking = ForwardBlocking(None, RATIO, selector="random", model=model)
        fit(module, blocking)
        assert stats_of(blocking).effective_ratio == pytest.approx(5 / 12)


class Iterates(Module):
    def training_step(self, dataloader_iter: Any) -> Any:
        raise AssertionError("training began")


def test_what_cannot_be_blocked_is_refused(feature: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match="dataloader_iter"):
        fit(Iterates(), ForwardBlocking("net.0", RATIO))
    with pytest.raises(TypeError, match="compile only submodules behind the cut") as compiled:
        fit(torch.compile(Module()), ForwardBlocking("net.0", RATIO))
    feature("Lightning", "a compiled LightningModule", compiled.value)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(TypeError, match="FSDPStrategy; use DDP") as sharded:
        ForwardBlocking("net.0", RATIO).on_fit_start(trainer, Module())
    feature("Lightning", "FSDPStrategy", sharded.value)


def test_interrupted_the_module_is_as_it_was() -> None:
    class Interrupts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(self.sizes) == 2:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    module, blocking = Interrupts(), ForwardBlocking("net.0", RATIO)
    with pytest.raises(SystemExit):
        fit(module, blocking)
    assert "training_step" not in vars(module)
    assert stats_of(blocking).steps_replayed == 2
