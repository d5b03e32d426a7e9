"""A subset, and the file it is kept in.

Shape suffixes: S chosen samples, N samples of the data set.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ..state.files import replacing
from .choosing import checked_labels

_FORMAT = "halfway coreset 1"
_HOW_TO = "`halfway coreset METHOD RECIPE --keep 0.5` writes such a file"


@dataclass(frozen=True, eq=False)
class Coreset:
    """Which samples of a data set to train on, and where that comes from.

    Attributes:
        ids: (S,) int64, sorted: positions in the data set.
        method, settings: its name; its settings with keep, class_balance and seed.
        num_samples: N.
        fingerprint: of the data set's labels and their order, see `fingerprint_of`.
        weights: (S,) how many samples each one stands for; None for all methods but Craig. The mean of weights * losses
            over a batch estimates the mean loss of all after a division by the weights' mean.
        scores: (N,) larger = retained; None for methods that choose samples jointly (`Greedy`), which score none.
        made_from, cost: plain values of the caller. `halfway coreset` notes the recipe, the proxies' network, length
            and seeds, a digest of the images, versions and the command; FLOPs and what they are in runs on full data.
    """

    ids: Tensor
    method: str
    settings: dict[str, Any]
    num_samples: int
    fingerprint: str
    weights: Tensor | None = None
    scores: Tensor | None = None
    made_from: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, dataset: Dataset[Any], labels: Tensor | None = None) -> Subset[Any]:
        """The chosen samples of the data set that it was made from.

        Args:
            labels: (N,) of the data set; None: only its length is compared.
        """
        length = len(dataset) if isinstance(dataset, Sized) else None
        if length != self.num_samples:
            raise ValueError(self._another(f"has {length} samples, the subset is of {self.num_samples}"))
        if labels is not None:
            self.check(labels)
        return Subset(dataset, self.ids.tolist())

    def check(self, labels: Tensor) -> None:
        """Raise if a data set with these labels (N,) is not the one that the subset was made from."""
        if len(labels) != self.num_samples:
            raise ValueError(self._another(f"has {len(labels)} samples, the subset is of {self.num_samples}"))
        if self.fingerprint_of(labels) != self.fingerprint:
            raise ValueError(self._another("has other labels, or the same in another order"))

    def _wrong(self) -> str:
        """What a file should hold and this does not; "" if it is whole."""
        settings, made = self.settings, self.made_from
        if not (isinstance(settings, dict) and isinstance(made, dict) and isinstance(self.cost, dict)):
            return "settings, made_from and cost as dicts"
        if not all(name in settings for name in ("keep", "seed")):
            return "the settings keep and seed"
        if not (
            isinstance(self.method, str) and isinstance(self.fingerprint, str) and isinstance(settings["keep"], float)
        ):
            return "a method, a fingerprint and the share that it keeps"
        ids, size = self.ids, self.num_samples
        if not (isinstance(ids, Tensor) and ids.ndim == 1 and ids.dtype == torch.int64 and isinstance(size, int)):
            return "whole numbers as ids, one of each sample, shape (S,)"
        if not (len(ids) and (ids.diff() > 0).all() and int(ids[0]) >= 0 and int(ids[-1]) < size):
            return "ids in order, each once, of a data set"
        if self.weights is not None and not (_is_row(self.weights, len(ids)) and self.weights.isfinite().all()):
            return f"one finite weight for each of its {len(ids)} samples"
        if self.scores is not None and not (_is_row(self.scores, size) and not self.scores.isnan().any()):
            return f"one score for each of the {size} samples of the data set, without NaN"
        return ""

    def _another(self, what: str) -> str:
        return (
            f"this data set {what}: the file ({self.method}) was made from another one. Choose the subset again for "
            f"the data that you train on ({_HOW_TO}), or train on the data that it was made from"
        )

    @staticmethod
    def fingerprint_of(labels: Tensor) -> str:
        """Distinguishes data sets by their length and labels; the same on every machine."""
        numbers = array.array("q", checked_labels(labels).tolist())
        if sys.byteorder == "big":
            numbers.byteswap()
        return f"{len(numbers)}:{hashlib.sha256(numbers.tobytes()).hexdigest()[:32]}"

    def save(self, path: str | Path) -> None:
        """Write all of it or nothing. `torch.load(path, weights_only=True)` reads it."""
        with replacing(Path(path)) as file:
            torch.save({"format": _FORMAT, **asdict(self)}, file)

    @classmethod
    def load(cls, path: str | Path, labels: Tensor | None = None) -> Coreset:
        """Read a file, and compare it with the labels (N,) of the data set if they are given."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no subset file {path}; {_HOW_TO}")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{path} is not a subset file ({type(error).__name__}); {_HOW_TO}") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError(f"{path} is not a subset file; {_HOW_TO}")
        try:
            found = cls(**content)
        except TypeError as error:
            raise ValueError(f"{path} is not a subset file of this halfway ({error}); {_HOW_TO}") from error
        if wrong := found._wrong():
            raise ValueError(f"{path} does not hold {wrong}; {_HOW_TO}")
        if labels is not None:
            found.check(labels)
        return found


def _is_row(values: Any, count: int) -> bool:
    return isinstance(values, Tensor) and values.shape == (count,)
