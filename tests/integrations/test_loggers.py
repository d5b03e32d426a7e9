"""`stats.as_dict()` as loggers take it: stable names, plain numbers."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfway import Density, ForwardBlocker, Schedule

# A promise: dashboards and scripts are built on these names. Add to them, but do not rename or drop one.
NAMES = [
    "steps",
    "pruned_steps",
    "samples_seen",
    "samples_retained",
    "effective_ratio",
    "relative_flops",
    "steps_replayed",
    "steps_recomputed",
    "operations_replayed",
    "operations_computed",
]


class Mixes(nn.Module):
    """The first layer mixes samples, so that every step is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x - x.mean(0)).relu())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def blocked(model: nn.Module, at: str = "0", **options: Any) -> ForwardBlocker:
    return ForwardBlocker(model, at, 0.5, selector=Density(num_centroids=4), **options)


def trained(model: nn.Module, blocker: ForwardBlocker, steps: int = 3) -> dict[str, float]:
    for _ in range(steps):
        model(blocker(torch.randn(8, 4))).sum().backward()
    return blocker.stats.as_dict()


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("situation", ["before the first step", "replayed", "recomputed", "before the window"])
def test_names_are_stable_and_values_are_plain_finite_numbers(situation: str) -> None:
    model: nn.Module = Mixes() if situation == "recomputed" else net()
    schedule = Schedule(100, unit="step") if situation == "before the window" else None
    blocker = blocked(model, "stem" if situation == "recomputed" else "0", schedule=schedule)
    values = trained(model, blocker, 0 if situation == "before the first step" else 3)
    assert list(values) == NAMES
    # Not bool, not NumPy's, not tensors: some loggers take these and some do not.
    assert {type(value) for value in values.values()} <= {int, float}
    assert all(math.isfinite(value) for value in values.values())
    assert json.loads(json.dumps(values)) == values
    assert values["steps_recomputed"] == (3 if situation == "recomputed" else 0)


def test_types_do_not_change_on_the_way() -> None:
    """A count is an int and a share is a float from the first step on, also after a resume: W&B infers types once."""
    model = net()
    blocker = blocked(model)
    before = {name: type(value) for name, value in blocker.stats.as_dict().items()}
    after = {name: type(value) for name, value in trained(model, blocker).items()}
    resumed = blocked(net())
    resumed.load_state_dict(blocker.state_dict())
    assert before == after == {name: type(value) for name, value in resumed.stats.as_dict().items()}
    assert [name for name in NAMES if before[name] is float] == ["effective_ratio", "relative_flops"]


def test_tensorboard_shows_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = net()
    blocker = blocked(model)
    with SummaryWriter(str(tmp_path)) as writer:
        for _ in range(2):
            values = trained(model, blocker, 5)
            for name, value in values.items():
                writer.add_scalar(f"blocking/{name}", value, global_step=values["steps"])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == [f"blocking/{name}" for name in NAMES]
    for name, value in values.items():
        first, last = events.Scalars(f"blocking/{name}")
        assert (first.step, last.step) == (5, 10)
        assert last.value == pytest.approx(value)


def test_lightning_s_log_dict_writes_it(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.blocker = blocked(self.net)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = self.blocker(*batch)
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log_dict({f"blocking/{name}": value for name, value in self.blocker.stats.as_dict().items()})
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=CSVLogger(str(tmp_path)),
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))
    trainer.fit(module, DataLoader(data, batch_size=8))
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["blocking/steps"]) for line in lines] == [2, 4, 6]
    for name, value in module.blocker.stats.as_dict().items():
        assert float(lines[-1][f"blocking/{name}"]) == pytest.approx(value)


def test_weights_and_biases_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    values = trained(model := net(), blocked(model))
    run = wandb.init(mode="offline", project="halfway", dir=str(tmp_path), settings=wandb.Settings(console="off"))
    try:
        run.log(values, step=int(values["steps"]), commit=True)
        summary = {name: run.summary[name] for name in NAMES}
    finally:
        run.finish()
    assert summary == values
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
