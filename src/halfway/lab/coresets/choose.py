"""From a method's name to a subset file: train its proxies, measure, choose, write.

    FOLDER/METHOD-KEEP-sSEED.pt    the subset, see `halfway.coresets.Coreset`
    FOLDER/...                     the proxies, see `proxies`

`Coreset.cost` is in FLOPs ("flops") and in runs of the recipe on all its data ("runs"), split into "trainings", which
methods share, and "measuring"; "set" names the trainings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import coresets
from ...coresets import Coreset, Evidence
from ...coresets.budgets import groups, share_to_keep
from ..data import Data
from ..environment import environment
from ..files import naming_a_full_disk
from ..recipes.predicted_cost import sample_flops
from ..recipes.schema import Recipe
from ..training import session
from ..training.cross_fitting import run_flops
from ..training.rank import wait_for_all
from ..training.run_folder import RunFolder
from ..training.run_result import RunResult
from . import evidence
from .chosen import labels_of, other_images, read, require_same_images
from .proxies import ProxyOptions, ProxySet, file_name, proxy_set, require_all_presented, require_smaller

# What a subset file says of each training that it was made from.
_OF_A_PROXY = ("model", "length", "unit", "batch_size", "stop_after", "seed")


@dataclass(frozen=True)
class Choice:
    """A subset that is to be made.

    method: a name of `halfway.coresets.METHODS`; its settings are those of the recipe's section of that name.
    recipe: of the runs that will use it. The unit of the cost is one of them, on all data.
    keep: the share to retain.
    folder: of the proxies.
    seed: of everything that the choice draws.
    record: the run folder of the method "retention".
    out: the file; None: in the folder.
    """

    method: str
    recipe: Recipe
    keep: float
    folder: Path
    seed: int = 0
    class_balance: bool = True
    options: ProxyOptions = field(default_factory=ProxyOptions)
    record: Path | None = None
    out: Path | None = None

    @property
    def file(self) -> Path:
        parts = [self.method, f"{self.keep:g}", *([] if self.class_balance else ["mixed"])]
        parts += [f"{key}={value}" for key, value in sorted(self._settings.items())]
        if (self._network or self.options.epochs) and (proxies := self.proxies) is not None:
            parts.append(proxies.name)
        parts += self.options.words(self.chooser.needs)
        if self._recorded is not None:
            parts.append(self._recorded.name)
        return self.out or self.folder / f"{file_name(parts)}-s{self.seed}.pt"

    @property
    def _settings(self) -> dict[str, Any]:
        return dict(self.recipe.methods.get(self.method, {}))

    @property
    def _recorded(self) -> Path | None:
        """The run whose record is read, if the method reads one."""
        return self.record if self.chooser.needs == "retention" else None

    @property
    def chooser(self) -> coresets.Method:
        return coresets.make(self.method, **self._settings)

    @property
    def _network(self) -> Mapping[str, Any]:
        """Of the proxies, where it is not the recipe's."""
        return self.options.network or (self.recipe.coreset.small if self.chooser.needs == "small run" else {})

    @property
    def proxies(self) -> ProxySet | None:
        options = dataclasses.replace(self.options, network=self._network)
        return proxy_set(self.recipe, self.chooser.needs, self.folder, options)

    def check(self) -> None:
        """Raise what can be known before data are read. Nothing is written."""
        share_to_keep(self.keep)
        if self.recipe.task != "classification":
            raise ValueError(f"coresets choose among classes of images; {self.recipe.name} is {self.recipe.task}")
        if self.file.is_dir() or (self.file.exists() and read(self.file) is None):
            raise ValueError(f"{self.file} exists and is no subset file; name another with --out")
        if self.chooser.needs == "retention":
            self._check_record()
        elif (proxies := self.proxies) is not None:
            if self.chooser.needs == "small run":
                require_smaller(proxies.recipes[0], self.recipe)
            proxies.check()
        sample_flops(self.recipe)  # a network that cannot be counted is refused here

    def _check_record(self) -> None:
        if self.record is None:
            raise ValueError(
                f"{self.method} reads the record of a run that pruned: `halfway coreset {self.method} RUN_FOLDER "
                f"--keep {self.keep:g}`, or coreset.record=RUN_FOLDER for `halfway compare`"
            )
        result = RunResult.read(self.record)
        if differs := other_images(result.recipe.as_dict()["data"], self.recipe):
            raise ValueError(f"{self.record} was trained on other images ({differs}); its record is about those")
        if not result.finished or not result.recipe.prunes:
            raise ValueError(f"{self.record} is not a finished run that pruned: it has no record of what it retained")

    def check_on(self, data: Data) -> None:
        """Raise what can be known of these images before proxies are trained. Nothing is written."""
        chooser, proxies = self.chooser, self.proxies
        chooser.check(groups(labels_of(data), self.keep, len(data.classes), self.class_balance), self.class_balance)
        if proxies is not None and "dynamics" in chooser.uses:
            require_all_presented(proxies.recipes[0], len(data.train), self.method)
        if self._recorded is not None:
            for noted in RunFolder(self._recorded).read_environment()[-1:]:
                fix = "take the record of a run on these"
                require_same_images(f"{self._recorded} was trained on", noted, data, fix)
        if self.out is not None and self.out.exists() and self.made_already(data) is None:
            raise ValueError(f"{self.out} holds another subset; remove it, or name another file with --out")

    def made_already(self, data: Data) -> Coreset | None:
        """The file, if it holds just what is asked for."""
        found = read(self.file)
        if found is None:
            return None
        own = {**self.chooser.settings, "keep": self.keep, "class_balance": self.class_balance, "seed": self.seed}
        asked = [self.method, own, Coreset.fingerprint_of(labels_of(data)), data.images, self._sources()]
        noted = [found.made_from.get(key) for key in ("images", "from")]
        return found if [found.method, found.settings, found.fingerprint, *noted] == asked else None

    def make(self, data: Data, device: torch.device, command: str) -> Coreset | None:
        """Choose, and write the file; None after Ctrl-C. What is missing of the proxies is trained first."""
        self.check_on(data)
        labels_N, chooser, proxies = labels_of(data), self.chooser, self.proxies
        if proxies is not None and not proxies.train(data, device, command):
            return None
        if self._recorded is not None:
            found = evidence.retention(RunFolder(self._recorded), labels_N, len(data.classes))
        else:
            found = evidence.gather(labels_N, proxies, chooser.uses, data, device)
        return self._chosen(found, proxies, data, device, command)

    def _chosen(
        self, found: Evidence, proxies: ProxySet | None, data: Data, device: torch.device, command: str
    ) -> Coreset:
        chooser = self.chooser
        made = chooser.choose(found, self.keep, class_balance=self.class_balance, seed=self.seed)
        about = environment(device)
        source = {
            "recipe": self.recipe.name,
            "settings": self.recipe.as_dict(),
            "from": self._sources(),
            **({} if self._recorded is None else {"record": RunResult.read(self._recorded).recipe.as_dict()}),
            "proxies": [{key: each.get(key) for key in _OF_A_PROXY} for each in (proxies.recipes if proxies else ())],
            "data": data.description,
            "images": data.images,
            "command": command,
            "versions": {name: str(version) for name, version in about["versions"].items()},
            "date": about["date"],
        }
        made = dataclasses.replace(made, made_from=source, cost=self._cost(proxies, chooser.uses, found.num_samples))
        if session.first_rank():
            with naming_a_full_disk(self.file):
                made.save(self.file)
        wait_for_all()
        return made

    def _sources(self) -> list[str]:
        """The run folders that it is made from: their names, and a digest of what they are."""
        if self._recorded is not None:
            counts = evidence.counts(RunFolder(self._recorded))
            return [f"{self._recorded.name} {_digest({name: each.tolist() for name, each in counts.items()})}"]
        proxies = self.proxies
        if proxies is None:
            return []
        pairs = zip(proxies.runs, proxies.recipes, strict=True)
        return [f"{run.path.name} {_digest(recipe.identity())}" for run, recipe in pairs]

    def _cost(self, proxies: ProxySet | None, uses: Any, samples: int) -> dict[str, Any]:
        trained, measured, name = 0.0, 0.0, ""
        if proxies is not None:
            trained, measured = evidence.flops_of(proxies, uses, samples)
            name = proxies.name
        elif self._recorded is not None:
            result = RunResult.read(self._recorded)
            trained, name = result.metrics[-1]["spent"] * sample_flops(result.recipe).step, self._recorded.name
        unit = run_flops(self.recipe, samples)
        return {
            "flops": trained + measured,
            "runs": (trained + measured) / unit,
            "trainings": trained / unit,
            "measuring": measured / unit,
            "set": name,
        }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]
