"""What is measured on trained proxies, and what all of it costs.

Measurements are kept in RUN/measured.pt, so that further methods, ratios and seeds find them. Proxies are in eval mode
and see every training image once, not augmented, with its plain label.

Shapes: N training images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...coresets import Checkpoint, Coreset, Dynamics, Evidence, ShortRun, measure
from ..data import Data
from ..files import write_tensors
from ..progress import Bar
from ..recipes.predicted_cost import sample_flops
from ..recipes.schema import Recipe
from ..training import recorders, session, tasks
from ..training.loop import Training
from ..training.rank import wait_for_all
from ..training.run_folder import RunFolder, first_line
from .chosen import labels_of
from .proxies import ProxySet

FILE = "measured.pt"


def gather(
    labels_N: Tensor, proxies: ProxySet | None, uses: Sequence[str], data: Data, device: torch.device
) -> Evidence:
    """The evidence with the pieces that `uses` names; measures what is not known yet."""
    pieces: dict[str, Any] = {}
    if proxies is not None:
        for recipe, run in zip(proxies.recipes, proxies.runs, strict=True):
            found = _Measured(recipe, run, data, device)
            if proxies.needs == "short runs":
                pieces.setdefault("short_runs", []).append(found.short_run("gradient_norms" in uses))
            elif proxies.needs == "checkpoints":
                pieces.setdefault("checkpoints", []).extend(found.checkpoints())
            else:
                pieces |= found.long_run(uses)
    return Evidence(labels_N, len(data.classes), **pieces)


def retention(run: RunFolder, labels_N: Tensor, classes: int) -> Evidence:
    """The evidence in the record of a run that pruned."""
    found = counts(run)
    return Evidence(labels_N, classes, offered_N=found["offered"], retained_N=found["retained"])


def counts(run: RunFolder) -> dict[str, Tensor]:
    """How often a finished run offered and retained each image."""
    record: dict[str, Tensor] = _finished(run)["retention"]
    return {name: record[name] for name in ("offered", "retained")}


def flops_of(proxies: ProxySet, uses: Sequence[str], samples: int) -> tuple[float, float]:
    """FLOPs of the trainings, and of measuring what `uses` names on them."""
    flops = sample_flops(proxies.recipes[0])
    trained = sum(result.metrics[-1]["spent"] for result in proxies.results()) * flops.step
    passes = 0.0  # over all images
    if proxies.needs == "checkpoints":
        points = sum(len(_points(run)) for run in proxies.runs)
        # The mean gradient, a forward-mode derivative of about two forward passes, and each sample's gradient.
        passes = points * (2 * flops.step + 2 * flops.forward)
    elif proxies.needs == "short runs":
        passes = len(proxies.runs) * (flops.forward + ("gradient_norms" in uses) * flops.step)
    elif {"features_ND", "logits_NC"} & set(uses):
        passes = flops.forward
    return trained, passes * samples


class _Measured:
    """What is known of one run, and how to find out more."""

    def __init__(self, recipe: Recipe, run: RunFolder, data: Data, device: torch.device) -> None:
        self.recipe, self.run, self.data, self.device = recipe, run, data, device
        self.path = run.path / FILE
        self.known: dict[str, Any] = {"labels": Coreset.fingerprint_of(labels_of(data))}
        if self.path.is_file():
            try:
                found = torch.load(self.path, map_location="cpu", weights_only=True)
            except Exception as error:
                raise ValueError(f"{self.path} cannot be read ({first_line(error)}); remove it") from error
            if found.get("labels") != self.known["labels"]:
                raise ValueError(f"{self.path} is about images with other labels; remove it to measure again")
            self.known = found
        wait_for_all()

    def long_run(self, uses: Sequence[str]) -> dict[str, Any]:
        state, wanted = _finished(self.run), [piece for piece in ("features_ND", "logits_NC") if piece in uses]
        if any(piece not in self.known for piece in wanted):
            training = self._restored(state["model"])
            with training.evaluation.statistics(training.model):
                found = measure.outputs(training.model, self._batches("outputs"), len(self.data.train))
            self._keep({"features_ND": found.features_ND, "logits_NC": found.logits_NC})
        pieces = {piece: self.known[piece] for piece in wanted}
        return {**pieces, "dynamics": Dynamics.of(state["recorded"])} if "dynamics" in uses else pieces

    def short_run(self, gradients: bool) -> ShortRun:
        if "error_norms_N" not in self.known or (gradients and self.known["gradient_norms_N"] is None):
            training, name = self._restored(_finished(self.run)["model"]), "gradients" if gradients else "errors"
            with training.evaluation.statistics(training.model):
                found = measure.short_run(
                    training.model, self._batches(name), len(self.data.train), gradients=gradients
                )
            self._keep(found._asdict())
        return ShortRun(**{piece: self.known[piece] for piece in ShortRun._fields})

    def checkpoints(self) -> list[Checkpoint]:
        _finished(self.run)
        for path in _points(self.run):
            if path.stem not in self.known:
                point = torch.load(path, map_location="cpu", weights_only=True)
                training = self._restored(point["model"])
                with training.evaluation.statistics(training.model):
                    batches = self._batches(f"gradients at step {point['step']:,}", passes=2)
                    found = measure.checkpoint(training.model, batches, len(self.data.train), point["lr"])
                self._keep({path.stem: found._asdict()})
        return [Checkpoint(**self.known[path.stem]) for path in _points(self.run)]

    def _restored(self, weights: dict[str, Tensor]) -> Training:
        training = Training(self.recipe, self.data, self.device, show=False)
        training.model.load_state_dict(weights)
        return training

    def _batches(self, name: str, passes: int = 1) -> _Batches:
        return _Batches(self.recipe, self.data, f"{self.run.path.name}: {name}", passes)

    def _keep(self, found: dict[str, Any]) -> None:
        self.known.update(found)
        if session.first_rank():
            write_tensors(self.path, self.known)
        wait_for_all()


class _Batches:
    """(inputs, labels, ids) of all training images, in order; can be gone through again."""

    def __init__(self, recipe: Recipe, data: Data, name: str, passes: int) -> None:
        self.recipe, self.data, self.name, self.passes, self.done = recipe, data, name, passes, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        first, count = 0, len(self.data.train)
        self.done += 1
        name = self.name if self.passes == 1 else f"{self.name}, pass {self.done} of {self.passes}"
        with Bar(count, name, "image", session.first_rank(), leave=False, delay=2.0) as bar:
            for x, y in self.data.trained_on.batches(self.recipe.evaluation_batch):
                yield tasks.laid_out(x, self.recipe), y, torch.arange(first, first + len(x))
                first += len(x)
                bar.update(len(x))


def _points(run: RunFolder) -> list[Path]:
    found = sorted((run.path / recorders.FOLDER).glob("*.pt"))
    if not found:
        raise ValueError(f"the checkpoints of {run.path} are gone; remove the folder to train it again")
    return found


def _finished(run: RunFolder) -> dict[str, Any]:
    state = run.load()
    if state is None or not state["finished"]:
        raise ValueError(f"the run in {run.path} is not finished; go on with it first (`halfway train --resume`)")
    return state
