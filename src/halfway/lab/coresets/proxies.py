"""The trainings that a method's evidence comes from, as ordinary run folders.

    FOLDER/long-s1000/                      the recipe on all data: for Forgetting, AUM and methods of features
    FOLDER/short-s1000/ ... short-s1009/    the recipe's own schedule, stopped at a tenth: for EL2N and GraNd
    FOLDER/points-s1000/, points-s1001/     ten checkpoints of each: for MoSo
    FOLDER/small-width=8-s1000/             a smaller network: for SVP

Methods and ratios share them. A set is trained once, and goes on where it was stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...coresets.base import Needs
from ..data import Data
from ..recipes.conversion import flat
from ..recipes.predicted_cost import sample_flops
from ..recipes.schema import Recipe
from ..training import session
from ..training.order import BatchOrder
from ..training.rank import wait_for_all
from ..training.run_folder import RunFolder
from ..training.run_result import RunResult
from ..training.trainable import check_trainable
from .chosen import require_same_images
from .settings import CoresetSettings

# Unlike the seeds of the runs that will use the subset.
FIRST_SEED = 1000
SHORT_SHARE = 0.1
_ANOTHER = "another folder (`halfway coreset --folder`, `halfway compare --out`)"
_NAMES: dict[Needs, str] = {"long run": "long", "small run": "small", "short runs": "short", "checkpoints": "points"}
_RUNS = {"short runs": 10, "checkpoints": 2}
_RECORD = {"long run": "dynamics", "small run": "dynamics", "checkpoints": "checkpoints"}


@dataclass(frozen=True)
class ProxyOptions:
    """How proxies differ from runs of the recipe.

    network: settings of the model, like {"options": {"width": 8}}; empty: the recipe's own.
    epochs: the length of their trainings; None: the recipe's.
    runs: how many, where a method takes the mean over several; None: 10 short ones, or 2 with checkpoints.
    seed: of the first.
    """

    network: Mapping[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    runs: int | None = None
    seed: int = FIRST_SEED

    def words(self, needs: Needs) -> list[str]:
        """For the name of a file that is made from other runs of the set than usual."""
        runs = [] if self.runs in (None, _RUNS.get(needs)) or needs not in _RUNS else [f"k{self.runs}"]
        return [*runs, *([] if self.seed == FIRST_SEED or needs not in _NAMES else [f"p{self.seed}"])]


@dataclass(frozen=True)
class ProxySet:
    """Trainings that differ in their seed alone.

    name: of the set, which its run folders begin with.
    recipes: of each training.
    """

    name: str
    needs: Needs
    recipes: tuple[Recipe, ...]
    folder: Path

    @property
    def runs(self) -> list[RunFolder]:
        return [RunFolder(self.folder / f"{self.name}-s{recipe.seed}") for recipe in self.recipes]

    def results(self) -> list[RunResult]:
        return [RunResult.read(run.path) for run in self.runs]

    def check(self) -> None:
        """Raise unless all of them can be trained, or go on, here. Nothing is written."""
        for recipe, run in zip(self.recipes, self.runs, strict=True):
            try:
                run.check(recipe, resume=True)
                if not _finished(run):
                    run.check_checkpoint()
            except ValueError as error:
                raise ValueError(str(error).replace("another with --out", _ANOTHER)) from error
            check_trainable(recipe)

    def unfinished(self) -> list[tuple[Recipe, RunFolder]]:
        """Those that are still to be trained, or to go on."""
        return [(recipe, run) for recipe, run in zip(self.recipes, self.runs, strict=True) if not _finished(run)]

    def train(self, data: Data, device: torch.device, command: str) -> bool:
        """Train what is missing, from where it stopped. Returns False after Ctrl-C."""
        for run in self.runs:
            for noted in run.read_environment()[-1:]:
                require_same_images(f"{run.path} was trained on", noted, data, f"choose {_ANOTHER}")
        todo = self.unfinished()
        wait_for_all()  # or a rank could find finished what another has just begun
        for i, (recipe, run) in enumerate(todo):
            if session.first_rank():
                print(f"proxy {i + 1} of {len(todo)}: {run.path}", flush=True)
            if not session.train(recipe, data, device, run, resume=True, command=command):
                return False
            wait_for_all()
        return True


def proxy_set(recipe: Recipe, needs: Needs, folder: Path, options: ProxyOptions) -> ProxySet | None:
    """The trainings that `needs` asks for; None if it asks for none.

    recipe: of the runs that will use the subset. Its method, ratio and seed do not matter.
    """
    if needs not in _NAMES:
        return None
    runs = _RUNS.get(needs, 1) if options.runs is None or needs not in _RUNS else options.runs
    if runs < 1 or (options.epochs is not None and options.epochs < 1):
        raise ValueError(f"proxies are at least 1 training of at least 1 epoch, got {runs} of {options.epochs}")
    base = recipe if options.epochs is None else recipe.of_length(options.epochs)
    base = dataclasses.replace(base, methods={}, coreset=CoresetSettings())
    network = {f"model.{key}": value for key, value in options.network.items()}
    # Without anything that does not matter to full data, so that other ratios, windows and cuts find the same runs.
    plain: dict[str, Any] = {
        "method": "full",
        "prune_ratio": 0.0,
        "window": [0, None],
        "cut": "",
        "selection_seed": None,
        "evaluate_every": base.length,
        "training_score": 0,
        "stop_after": SHORT_SHARE if needs == "short runs" else 1.0,
        "record": _RECORD.get(needs, "nothing"),
    }
    made = tuple(base.with_settings({**network, **plain, "seed": options.seed + i}) for i in range(runs))
    return ProxySet(_name(needs, options), needs, made, folder)


def require_smaller(proxy: Recipe, recipe: Recipe) -> None:
    """Raise unless the proxy's network costs less than the recipe's."""
    small, large = (sample_flops(each).step / 1e9 for each in (proxy, recipe))
    if small >= large:
        raise ValueError(
            f"this method takes a network smaller than the one to train: {proxy.model.name} {proxy.model.options} has "
            f"{small:.3g} GFLOPs per sample and step, {recipe.model.name} {recipe.model.options} {large:.3g}. Give it "
            "less: model.options.width=8, say, or coreset.small={options: {width: 8}} for `halfway compare`"
        )


def require_all_presented(recipe: Recipe, samples: int, method: str) -> None:
    """Raise if a training leaves an image out: batches that are not full are, and which these are is known."""
    if missed := _missed(recipe, samples, recipe.batch_size):
        fits = next(size for size in range(recipe.batch_size, 0, -1) if not _missed(recipe, samples, size))
        raise ValueError(
            f"{method} needs every image, and {missed} of {samples:,} are in no full batch of {recipe.batch_size} in "
            f"a proxy of {recipe.length} {recipe.unit}(s); take batch_size={fits}, or longer proxies: --proxy-epochs, "
            "or coreset.proxy_epochs= for `halfway compare`"
        )


def _missed(recipe: Recipe, samples: int, batch_size: int) -> int:
    order, epoch, seen_N = BatchOrder(samples, batch_size, recipe.seed), 0, torch.zeros(samples, dtype=torch.bool)
    steps = recipe.length * (order.per_epoch if recipe.unit == "epoch" else 1)
    while steps > 0 and not seen_N.all():
        plan = order.epoch(epoch)[:steps]
        seen_N[torch.cat([ids for ids, _ in plan])] = True
        epoch, steps = epoch + 1, steps - len(plan)
    return samples - int(seen_N.sum())


def _name(needs: Needs, options: ProxyOptions) -> str:
    """small-width=8-e4"""
    changed = [f"{key.split('.')[-1]}={value}" for key, value in flat(options.network).items()]
    epochs = [] if options.epochs is None else [f"e{options.epochs}"]
    return file_name([_NAMES[needs], *changed, *epochs])


def file_name(parts: Sequence[str]) -> str:
    """The parts as the name of a file."""
    return "".join(c if c.isalnum() or c in "-=._" else "_" for c in "-".join(parts))


def _finished(run: RunFolder) -> bool:
    """By its checkpoint: a run that was killed right before the last one has all its metrics."""
    state = run.load()
    return state is not None and state["finished"]
