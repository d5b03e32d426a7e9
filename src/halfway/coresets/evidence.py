"""What proxy trainings leave behind, and what the methods choose from: plain tensors, each of them optional.

Shape suffixes: N samples, C classes, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .choosing import checked_labels
from .dynamics import Dynamics


class ShortRun(NamedTuple):
    """One short training, at its end; `halfway.coresets.measure.short_run` makes it.

    Norms instead of logits and features: ten runs on a large set would not fit into memory.
    """

    error_norms_N: Tensor  # norm of p - y
    feature_norms_N: Tensor | None = None  # norm of the penultimate features
    gradient_norms_N: Tensor | None = None  # norm of the gradient of each sample's loss for all parameters


class Checkpoint(NamedTuple):
    """One moment of a training; `halfway.coresets.measure.checkpoint` makes it."""

    lr: float
    alignments_N: Tensor  # g_i . g_mean, over all parameters
    square_norms_N: Tensor | None = None  # g_i . g_i; None: the sample's own share of g_mean is neglected


# What each piece is called in an error, and where it comes from.
_HOW_TO = {
    "features_ND": "the penultimate features of a trained proxy: `measure.outputs(model, batches, num_samples)`",
    "logits_NC": "the logits of a trained proxy: `measure.outputs(model, batches, num_samples)`",
    "dynamics": "a record of a whole training: `Dynamics(num_samples)`, and its `observe` in every step",
    "error_norms": "ten short trainings, of as many seeds: `measure.short_run(model, batches, num_samples)` of each",
    "feature_norms": "short trainings: `measure.short_run(model, batches, num_samples)` of each",
    "gradient_norms": "short trainings: `measure.short_run(model, batches, num_samples, gradients=True)` of each",
    "checkpoints": "checkpoints of a training: `measure.checkpoint(model, batches, num_samples, lr)` at each",
    "retention": "how often each sample was offered and retained (offered_N, retained_N) in a run that pruned",
}


@dataclass
class Evidence:
    """All that is known about a training set before a subset is chosen. Tensors are moved to the CPU.

    Args:
        labels_N: the class of each sample, in the order of the data set.
        num_classes: C.
        features_ND: the input of the proxy's last linear layer, in eval mode, without augmentation.
        logits_NC: its outputs on the same.
        dynamics: what the proxy's training showed.
        short_runs: one entry for each seed.
        checkpoints: of one or several trainings.
        offered_N, retained_N: how often each sample was in a pruned batch, and how often it stayed.
    """

    labels_N: Tensor
    num_classes: int
    features_ND: Tensor | None = None
    logits_NC: Tensor | None = None
    dynamics: Dynamics | None = None
    short_runs: Sequence[ShortRun] = field(default_factory=list)
    checkpoints: Sequence[Checkpoint] = field(default_factory=list)
    offered_N: Tensor | None = None
    retained_N: Tensor | None = None

    def __post_init__(self) -> None:
        self.labels_N = checked_labels(self.labels_N)
        if not len(self.labels_N):
            raise ValueError("there are no labels; pass those of the whole training set, in its order")
        if int(self.labels_N.max()) >= self.num_classes:
            raise ValueError(
                f"there is the label {int(self.labels_N.max())}, with num_classes={self.num_classes}; classes are "
                "numbered from 0, so pass the largest label plus 1"
            )
        self.features_ND = self._whole("features_ND", self.features_ND, None)
        self.logits_NC = self._whole("logits_NC", self.logits_NC, self.num_classes)
        self.offered_N = self._per_sample("offered_N", self.offered_N)
        self.retained_N = self._per_sample("retained_N", self.retained_N)
        if self.dynamics is not None and self.dynamics.num_samples != self.num_samples:
            raise ValueError(
                f"the dynamics are of {self.dynamics.num_samples} samples, the labels of {self.num_samples}; record a "
                "training on this data set"
            )
        self.short_runs = [
            ShortRun(*(self._per_sample(f"{name} of a short run", part) for name, part in run._asdict().items()))  # type: ignore[arg-type]
            for run in self.short_runs
        ]
        self.checkpoints = [
            Checkpoint(
                float(point.lr),
                self._per_sample("alignments_N of a checkpoint", point.alignments_N),  # type: ignore[arg-type]
                self._per_sample("square_norms_N of a checkpoint", point.square_norms_N),
            )
            for point in self.checkpoints
        ]

    @property
    def num_samples(self) -> int:
        return len(self.labels_N)

    def missing(self, uses: Sequence[str]) -> list[str]:
        """Those of the pieces `uses` (see `Method.uses`) that are not there."""
        return [piece for piece in uses if not self._has(piece)]

    def require(self, uses: Sequence[str], method: str) -> None:
        """Raise unless all pieces are there; the error says where they come from."""
        missing = self.missing(uses)
        if missing:
            raise ValueError(
                f"{method} needs {'; '.join(_HOW_TO[piece] for piece in missing)}; pass it to `Evidence`, or let "
                f"`halfway coreset {method} RECIPE` train the proxy"
            )

    def short(self, piece: str) -> list[Tensor]:
        """A piece of each short run, such as "error_norms"."""
        return [getattr(run, f"{piece}_N") for run in self.short_runs]

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, for `torch.load(weights_only=True)`; pieces that are not there are left out."""
        state: dict[str, Any] = {"labels_N": self.labels_N, "num_classes": self.num_classes}
        for name in ("features_ND", "logits_NC", "offered_N", "retained_N"):
            if getattr(self, name) is not None:
                state[name] = getattr(self, name)
        if self.dynamics is not None:
            state["dynamics"] = self.dynamics.state_dict()
        state["short_runs"] = [dict(run._asdict()) for run in self.short_runs]
        state["checkpoints"] = [dict(point._asdict()) for point in self.checkpoints]
        return state

    @classmethod
    def of(cls, state: dict[str, Any]) -> Evidence:
        """From what `state_dict` returned."""
        pieces = dict(state)
        if "dynamics" in pieces:
            pieces["dynamics"] = Dynamics.of(pieces["dynamics"])
        pieces["short_runs"] = [ShortRun(**run) for run in pieces.get("short_runs", [])]
        pieces["checkpoints"] = [Checkpoint(**point) for point in pieces.get("checkpoints", [])]
        return cls(**pieces)

    def _has(self, piece: str) -> bool:
        if piece == "retention":
            return self.offered_N is not None and self.retained_N is not None
        if piece == "checkpoints":
            return bool(self.checkpoints)
        if piece in ("error_norms", "feature_norms", "gradient_norms"):
            return bool(self.short_runs) and all(part is not None for part in self.short(piece))
        return getattr(self, piece) is not None

    def _whole(self, name: str, value: Tensor | None, width: int | None) -> Tensor | None:
        if value is None:
            return None
        if value.ndim != 2 or len(value) != self.num_samples or (width or value.shape[1]) != value.shape[1]:
            raise ValueError(
                f"{name} must have the shape ({self.num_samples}, {width or 'D'}), a row per sample in the order of "
                f"the data set, got {tuple(value.shape)}"
            )
        self._all_finite(name, value)
        return value.detach().cpu()

    def _per_sample(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        if value.ndim != 1 or len(value) != self.num_samples:
            raise ValueError(
                f"{name} must have one number for each of the {self.num_samples} samples, got {tuple(value.shape)}"
            )
        self._all_finite(name, value)
        return value.detach().cpu()

    def _all_finite(self, name: str, value: Tensor) -> None:
        wrong_N = ~value.isfinite() if value.ndim == 1 else ~value.isfinite().all(1)
        if wrong_N.any():
            raise ValueError(
                f"{name} has values that are not finite for {int(wrong_N.sum())} samples, for example sample "
                f"{int(wrong_N.nonzero()[0])}: NaN scores would follow. The proxy has probably diverged: lower its "
                "learning rate, or check the inputs"
            )
