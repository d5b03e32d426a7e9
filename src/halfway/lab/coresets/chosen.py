"""A training on a subset that was chosen once: the subset file as a sampler, and as a part of the recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...coresets import Coreset
from ...samplers.base import Decision, EpochSampler

if TYPE_CHECKING:
    from ..data import Data
    from ..recipes.schema import Recipe


# Settings of the data that do not say which images there are to train on.
_NOT_THE_IMAGES = ("size", "augment", "memory", "workers", "evaluate", "test_samples")


class ChosenOnce(EpochSampler):
    """The same samples in every epoch.

    Args:
        data: N.
        prune_ratio: what the subset leaves out, which is exact.
        content: see `content_of`; part of the state, so that a run goes on with the same subset only.
    """

    name = "chosen_once"

    def __init__(self, data: int, prune_ratio: float, content: str = "", **common: Any) -> None:
        super().__init__(data, prune_ratio, **common)
        self._decision = Decision(torch.empty(0, dtype=torch.int64))

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        return self._decision

    @classmethod
    def of(cls, coreset: Coreset, seed: int) -> ChosenOnce:
        share = 1 - len(coreset) / coreset.num_samples
        made = cls(coreset.num_samples, share, content_of(coreset), seed=seed)
        weights = None if coreset.weights is None else coreset.weights / coreset.weights.mean()
        made._decision = Decision(coreset.ids, weights if cls.reweights else None)
        return made


class ChosenOnceWeighted(ChosenOnce):
    """The same, with the losses multiplied by the samples' weights, whose mean is made 1."""

    reweights = True


def sampler_of(recipe: Recipe, data: Data | None) -> EpochSampler:
    """The sampler of a recipe whose method chooses once.

    data: which the file is compared with; None: only the file is looked at.
    """
    if recipe.coreset.file is None:
        share = f"{1 - recipe.require_one_ratio(recipe.method):g}"
        raise ValueError(
            f"{recipe.method} chooses its samples once, before the training. Make a subset first (`halfway coreset "
            f"{recipe.method} {recipe.name} --keep {share}`), then train on it: `halfway train {recipe.name} --subset "
            "FILE`; `halfway compare` does both"
        )
    coreset, file = Coreset.load(recipe.coreset.file, None if data is None else data.train.labels), recipe.coreset.file
    _require_content(recipe, coreset)
    if len(coreset) < recipe.batch_size:
        raise ValueError(f"the {len(coreset)} images of {file} are less than a batch; take a smaller batch_size")
    chosen_for = coreset.made_from.get("settings", {}).get("data")
    if chosen_for and (differs := other_images(chosen_for, recipe)):
        raise ValueError(f"{file} was chosen from other images ({differs}); choose again for these")
    if data is not None:
        again = "choose again for these (`halfway coreset`), or name the folder of those with --data"
        require_same_images(f"{file} was chosen from", coreset.made_from, data, again)
    weighted = recipe.coreset.weights and coreset.weights is not None
    return (ChosenOnceWeighted if weighted else ChosenOnce).of(coreset, recipe.draw_seed)


def pinned(recipe: Recipe) -> Recipe:
    """The recipe with what its subset file says: the method, its settings, its ratio and what the file holds."""
    from ..recipes import methods

    file = recipe.coreset.file
    if file is None:
        return recipe
    coreset = Coreset.load(file)
    _require_content(recipe, coreset)
    if coreset.method not in methods.METHODS:
        fix = "put its class into coresets.METHODS before halfway.lab is imported, or train on Coreset.of(dataset)"
        raise ValueError(f"{file} was made by {coreset.method!r}, which the command line does not know; {fix}")
    known = methods.settings_of(coreset.method)
    settings = {f"{coreset.method}.{name}": coreset.settings[name] for name in known if name in coreset.settings}
    return recipe.with_settings(
        {
            "method": coreset.method,
            "prune_ratio": round(1 - coreset.settings["keep"], 6),
            "coreset.content": content_of(coreset),
            **settings,
        }
    )


def content_of(coreset: Coreset) -> str:
    """Equal for subsets of the same samples and weights, of the same data set."""
    digest = hashlib.sha256(f"{coreset.fingerprint} {coreset.ids.tolist()}".encode())
    if coreset.weights is not None:
        digest.update(f"{coreset.weights.tolist()}".encode())
    return digest.hexdigest()[:16]


def other_images(before: Mapping[str, Any], recipe: Recipe) -> str:
    """How the images that a recipe trains on differ from those of other settings of the data; "" if they do not."""
    pairs = ((key, before.get(key), value) for key, value in recipe.as_dict()["data"].items())
    differing = (f"data.{key} was {a!r}, is {b!r}" for key, a, b in pairs if key not in _NOT_THE_IMAGES and a != b)
    return next(differing, "")


def require_same_images(what: str, source: Mapping[str, Any], data: Data, fix: str) -> None:
    """Raise if something comes from other images, though there may be as many of each class.

    source: what is noted of them; before there was a digest, the description alone.
    """
    noted, now = (source["images"], data.images) if "images" in source else (source.get("data"), data.description)
    if noted is not None and noted != now:
        raise ValueError(f"{what} other images ({source.get('data')}) than these ({data.description}); {fix}")


def labels_of(data: Data) -> Tensor:
    """(N,) of the training images; that they are for classification is known by now."""
    assert data.train.labels is not None
    return data.train.labels


def kept_per_class(coreset: Coreset, labels_N: Tensor, names: list[str]) -> str:
    """airplane 500 of 1,000, ...; shorter if there are many classes."""
    kept_C = torch.bincount(labels_N[coreset.ids], minlength=len(names)).tolist()
    sizes_C = torch.bincount(labels_N, minlength=len(names)).tolist()
    if len(set(zip(kept_C, sizes_C, strict=True))) == 1:
        return f"{kept_C[0]:,} of {sizes_C[0]:,} in each of the {len(names)} classes"
    if len(names) > 20:
        least, most = (pick(range(len(names)), key=lambda c: kept_C[c] / max(1, sizes_C[c])) for pick in (min, max))
        ends = (f"{names[c]} ({kept_C[c]:,} of {sizes_C[c]:,})" for c in (least, most))
        return " to ".join(ends) + f", of {len(names)} classes"
    return ", ".join(f"{n} {k:,} of {s:,}" for n, k, s in zip(names, kept_C, sizes_C, strict=True))


def read(path: Path) -> Coreset | None:
    """The subset in a file; None if it is gone or holds something else."""
    try:
        return Coreset.load(path)
    except (OSError, ValueError):
        return None


def _require_content(recipe: Recipe, coreset: Coreset) -> None:
    expected = recipe.coreset.content
    if expected is not None and content_of(coreset) != expected:
        raise ValueError(
            f"{recipe.coreset.file} holds another subset than when this run was planned; put the old file back, or "
            "train in another folder (drop coreset.content from the recipe)"
        )
