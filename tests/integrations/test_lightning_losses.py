"""The Lightning callback with ids and losses, for every selector, and what it logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import halfway
from halfway.integrations.lightning import ForwardBlocking
from tests.helpers.lightning_modules import (
    RATIO,
    Module,
    data,
    fit,
    stats_of,
)
from tests.helpers.matrix import SELECTOR_IN

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")


class Reports(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        return {"loss": losses.mean(), "losses": losses}


SELECTORS = [name for name in halfway.selectors.SELECTORS if not name.startswith("rho") and name != "proxy"]


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_gets_what_it_needs(selector: str, feature: Callable[..., None]) -> None:
    module, blocking = Reports(), ForwardBlocking("net.0", RATIO, ids=2, selector=selector, reuse="replay")
    fit(module, blocking, data=DataLoader(halfway.WithIds(data()), batch_size=12))
    found = stats_of(blocking)
    assert found.pruned_steps == 8
    assert found.steps_replayed == (8 if blocking.blocker.selector.needs != "nothing" else 0)
    feature(f"{SELECTOR_IN}Lightning", selector, found)


def test_losses_come_back_with_their_ids() -> None:
    class Told(halfway.selectors.SELECTORS["last_loss"]):
        told: list[Any] = []  # noqa: RUF012

        def observe(self, candidates: Any, retained: Any, losses: Tensor) -> None:
            self.told.append((candidates.ids[retained], losses))

    class Numbered(Reports):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return {**output, "losses": batch[2].float()}

    fit(Numbered(), ForwardBlocking(None, RATIO, ids=2, selector=Told()), data=DataLoader(halfway.WithIds(data()), 12))
    assert len(Told.told) == 8
    for ids, losses in Told.told:
        assert torch.equal(ids.float(), losses)


def test_remembered_features() -> None:
    selector = halfway.selectors.SELECTORS["balanced_remembered"]()
    module, blocking = Reports(), ForwardBlocking(None, RATIO, ids=2, selector=selector)
    fit(module, blocking, data=DataLoader(halfway.WithIds(data()), batch_size=12))
    assert stats_of(blocking).relative_flops == pytest.approx(7 / 12)


@pytest.mark.parametrize("name", ["rho", "rho_remembered"])
def test_rho_with_the_losses_of_a_holdout_model(name: str, feature: Callable[..., None]) -> None:
    rho = halfway.selectors.SELECTORS[name](losses=torch.rand(48))
    module, blocking = Reports(), ForwardBlocking("net.0", RATIO, ids=2, selector=rho, reuse="replay")
    fit(module, blocking, data=DataLoader(halfway.WithIds(data()), batch_size=12))
    assert stats_of(blocking).steps_replayed == (8 if name == "rho" else 0)
    feature(f"{SELECTOR_IN}Lightning", name, stats_of(blocking))


def test_ratio_and_cost_are_logged(tmp_path: Path) -> None:
    module, blocking = Module(), ForwardBlocking("net.0", RATIO)
    trainer = fit(module, blocking, logger=CSVLogger(tmp_path, version=0), log_every_n_steps=3)
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    header, rows = lines[0].split(","), [line.split(",") for line in lines[1:]]
    stats = stats_of(blocking)
    logged = [float(row[header.index("halfway/relative_flops")]) for row in rows]
    steps = [int(row[header.index("step")]) for row in rows]
    # Every third step, and at the end of both epochs.
    assert steps == [2, 3, 5, 7]
    assert logged[-1] == pytest.approx(stats.relative_flops)
    assert float(trainer.callback_metrics["halfway/effective_ratio"]) == pytest.approx(stats.effective_ratio)
    assert float(trainer.callback_metrics["halfway/steps_replayed"]) == 8
    quiet = fit(Module(), ForwardBlocking("net.0", RATIO, log=False))
    assert not quiet.callback_metrics
