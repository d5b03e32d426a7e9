"""The Lightning callback, in the real Trainer: the same training as a loop by hand, and really replayed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import halfway
from halfway.integrations.lightning import ForwardBlocking
from tests import ROOT
from tests.helpers import processes
from tests.helpers.compiled import compiled_parts
from tests.helpers.lightning_modules import (
    RATIO,
    CallsTheNet,
    Manual,
    Module,
    NoForward,
    by_hand,
    data,
    fit,
    loader,
    network,
    same,
    stats_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")
EXAMPLE = ROOT / "examples" / "lightning_trainer.py"


# --------------------------------------------------------------------------------------------- the same training

KINDS: dict[str, tuple[Callable[[], Module], dict[str, Any]]] = {
    "self(x)": (Module, {"at": "net.0"}),
    "a net without a forward around it": (NoForward, {"at": "net.0"}),
    "a named submodule": (CallsTheNet, {"at": "net.0", "model": "net"}),
    "the cut by its name in it": (CallsTheNet, {"at": "0", "model": "net"}),
    "manual optimization": (Manual, {"at": "net.0"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_training_of_a_loop_by_hand(kind: str, feature: Callable[..., None]) -> None:
    make, settings = KINDS[kind]
    module, blocking = make(), ForwardBlocking(prune_ratio=RATIO, reuse="replay", **settings)
    fit(module, blocking)
    model, blocker = by_hand()
    same(module, model)
    found = stats_of(blocking)
    assert found == blocker.stats
    assert found.steps_replayed == found.pruned_steps == 8
    assert "training_step" not in vars(module)
    if kind in ("self(x)", "manual optimization"):
        feature("Lightning", "automatic optimization" if kind == "self(x)" else kind, found)


def test_the_other_package_of_the_same_name() -> None:
    """`lightning` and `pytorch_lightning` are often installed side by side, with classes of their own."""
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        training_step = NoForward.training_step
        configure_optimizers = NoForward.configure_optimizers

    module, blocking = Other(), ForwardBlocking("net.0", RATIO, reuse="replay")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pytorch_lightning.Trainer(callbacks=[blocking], max_epochs=2, enable_checkpointing=False, **quiet)
    trainer.fit(module, loader())
    same(module, by_hand()[0])


def test_in_mixed_precision_the_first_step_is_replayed_too(feature: Callable[..., None]) -> None:
    module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
    fit(module, blocking, precision="bf16-mixed")
    model, blocker = by_hand(dtype=torch.bfloat16)
    same(module, model)
    assert stats_of(blocking) == blocker.stats
    assert stats_of(blocking).steps_replayed == 8
    assert not torch.equal(model[0][0].weight, by_hand()[0][0][0].weight)
    feature("Lightning", "precision bf16-mixed", stats_of(blocking))


def test_a_network_compiled_after_the_cut_is_replayed(feature: Callable[..., None]) -> None:
    module, blocking = Module(), ForwardBlocking("net.0", RATIO)
    halfway.compile(module.net, at="0", backend="eager")
    fit(module, blocking)
    model, _ = by_hand()
    for found, expected in zip(module.net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert compiled_parts(module) == ["net.1"]
    assert stats_of(blocking).steps_replayed == 8
    feature("Lightning", "halfway.compile(module.net)", stats_of(blocking))


def test_accumulation(feature: Callable[..., None]) -> None:
    module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
    fit(module, blocking, accumulate_grad_batches=2)
    same(module, by_hand(accumulate=2)[0])
    feature("Lightning", "accumulate_grad_batches", stats_of(blocking))


def test_a_ratio_of_zero_is_the_plain_trainer_bit_for_bit() -> None:
    plain, blocked = Module(), Module()
    fit(plain)
    fit(blocked, ForwardBlocking("net.0", 0.0))
    same(blocked, plain.net)


def test_a_schedule_counts_the_trainers_epochs() -> None:
    module = Module()
    fit(module, ForwardBlocking("net.0", 0.5, schedule=halfway.Schedule(1, 2)), max_epochs=3)
    assert module.sizes == [12] * 4 + [6] * 4 + [12] * 4


class Dictionary(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["image"]), batch["label"])


def test_dictionaries_whose_names_forward_does_not_know() -> None:
    named = [{"image": x, "label": y} for x, y in data()]
    module, blocking = Dictionary(), ForwardBlocking("net.0", RATIO, inputs=["image"], reuse="replay")
    fit(module, blocking, data=DataLoader(named, batch_size=12))
    same(module, by_hand()[0])


def test_a_copy_of_the_module_in_the_middle_of_training(feature: Callable[..., None]) -> None:
    class Copies(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            assert "training_step" in vars(pl_module)
            again = copy.deepcopy(pl_module)
            assert again.training_step.__func__ is Module.training_step
            assert again.training_step.__self__ is again

    module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
    fit(module, blocking, Copies())
    same(module, by_hand()[0])
    module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
    fit(module, blocking, EMAWeightAveraging(decay=0.9))
    assert stats_of(blocking).steps_replayed == 8
    feature("Lightning", "EMAWeightAveraging", stats_of(blocking))


def test_fast_dev_run(feature: Callable[..., None]) -> None:
    module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
    fit(module, blocking, fast_dev_run=2)
    assert stats_of(blocking).steps_replayed == 2
    feature("Lightning", "fast_dev_run", stats_of(blocking))


def test_the_example() -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps_replayed=2, steps_recomputed=0" in done.stdout


# --------------------------------------------------------------------------------------------- several processes

PRECISIONS = ("32-true", "bf16-mixed")


def _lightning_on(rank: int) -> list[tuple[dict[str, Tensor], halfway.Stats, list[int]]]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()}, TORCHELASTIC_RUN_ID="test")
    found = []
    for precision in PRECISIONS:
        module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
        batches = loader(sampler=DistributedSampler(data(), 2, rank, shuffle=False))
        settings = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        fit(module, blocking, data=batches, precision=precision, **settings)
        found.append((module.net.state_dict(), stats_of(blocking), module.sizes))
    return found


def _by_hand_on(rank: int) -> list[dict[str, Tensor]]:
    found = []
    for precision in PRECISIONS:
        model = network()
        ddp = nn.parallel.DistributedDataParallel(model)
        blocker = halfway.ForwardBlocker(ddp, "0", RATIO)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            blocker.set_epoch(epoch)
            for x, y in loader(sampler=DistributedSampler(data(), 2, rank, shuffle=False)):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    x, y = blocker(x, y)
                    loss = F.cross_entropy(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        found.append(model.state_dict())
    return found


def _both_on(rank: int) -> tuple[Any, Any]:
    """In the same processes, since importing takes longer than training."""
    return _by_hand_on(rank), _lightning_on(rank)


def test_ddp_on_two_processes_is_a_ddp_loop_by_hand(feature: Callable[..., None]) -> None:
    expected, found = zip(*processes.run(2, _both_on), strict=True)
    for i, precision in enumerate(PRECISIONS):
        for rank in range(2):
            state, stats, sizes = found[rank][i]
            for name, tensor in expected[rank][i].items():
                torch.testing.assert_close(state[name], tensor, msg=name)
            assert stats.steps_replayed == stats.pruned_steps == 4
            assert sizes == [7] * 4
        feature("Lightning", f"DDP, 2 processes, precision {precision}", found[0][i][1])


# ------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize("middle", [False, True])
def test_resumed_from_the_trainers_checkpoint_the_bits_are_the_same(
    middle: bool, tmp_path: Path, feature: Callable[..., None]
) -> None:
    """Also from the middle of an epoch, with a data loader that remembers where it was."""

    def train(epochs: int, checkpoint: Path | None = None) -> tuple[Module, ForwardBlocking]:
        module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay", seed=3)
        often = {"every_n_train_steps": 6} if middle else {"every_n_epochs": 2}
        saving = ModelCheckpoint(tmp_path / str(epochs), save_top_k=-1, filename="saved", **often)
        batches = StatefulDataLoader(data(), batch_size=12) if middle else loader()
        fit(module, blocking, saving, max_epochs=epochs, data=batches, checkpoint=checkpoint)
        return module, blocking

    whole, expected = train(3)
    train(2)
    resumed, blocking = train(3, tmp_path / "2" / "saved.ckpt")
    assert len(resumed.sizes) == (6 if middle else 4)
    same(resumed, whole.net)
    assert stats_of(blocking) == stats_of(expected)
    for name, value in expected.state_dict()["selector"].items():
        assert torch.equal(torch.as_tensor(blocking.state_dict()["selector"][name]), torch.as_tensor(value)), name
    feature(
        "Lightning", f"resumed{' in the middle of an epoch, StatefulDataLoader' if middle else ''}", stats_of(blocking)
    )


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    fit(Module(), ForwardBlocking("net.0", RATIO), ModelCheckpoint(tmp_path, save_last=True))
    with pytest.raises(ValueError, match="prune_ratio"):
        fit(Module(), ForwardBlocking("net.0", 0.5), checkpoint=tmp_path / "last.ckpt", max_epochs=3)


def test_a_second_fit_goes_on_where_the_first_ended() -> None:
    module, blocking = Module(), ForwardBlocking("net.0", RATIO, reuse="replay")
    fit(module, blocking, max_epochs=1)
    assert stats_of(blocking).steps == 4
    fit(module, blocking, max_epochs=1)
    assert stats_of(blocking).steps == 8
