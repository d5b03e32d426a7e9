"""A linear classifier that is trained as samples come by, one step of SGD per batch, and is the same on all ranks.

Shape suffixes: B batch, D inputs, C classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..functional import all_finite
from ..settings import plain_settings
from .flags import StickyFlag
from .ranks import ALONE, PendingSum, Ranks

_MOMENTUM = 0.9
# Weight of a batch in the running mean and variance: that of BatchNorm. The first batches weigh 1, 1/2, 1/3, ...
_NEWEST = 0.1
# What is added to an input's variance, relative to the mean variance and to the mean square of all inputs: an input
# that never changes must not blow up its rounding errors.
_OF_VARIANCE, _OF_SQUARE = 1e-3, 1e-8


class OnlineHead:
    """Softmax regression on standardised inputs, from zero: at first all classes are equally likely.

    Inputs are standardised by running statistics, because the features of a network in training change their scale. A
    batch is predicted by what earlier batches taught; its gradient is then taken at inputs that are standardised with
    the batch included, so that the very first batch teaches as well as any other.

    Args:
        inputs: D.
        classes: C.
        lr: learning rate of SGD (momentum 0.9).

    Attributes:
        refused: whether a batch was left out because of a value that is not finite; not part of the state.
    """

    @plain_settings
    def __init__(self, inputs: int, classes: int, lr: float = 0.05) -> None:
        self.inputs, self.classes, self.lr = inputs, classes, lr
        self.refused = StickyFlag()
        self._pending: PendingSum | None = None
        # The last column is the bias. On the CPU until the first samples show their device.
        self._weights = torch.zeros(classes, inputs + 1, device="cpu", dtype=torch.float32)
        self._velocity = torch.zeros_like(self._weights)
        self._mean = torch.zeros(inputs, device="cpu", dtype=torch.float32)
        self._variance = torch.zeros_like(self._mean)
        self._batches = torch.zeros((), device="cpu", dtype=torch.int64)
        self._gain = torch.zeros((), device="cpu", dtype=torch.float32)

    @property
    def skill(self) -> Tensor:
        """() in [0, 1]: the part of log C by which its predictions of the last batches, made before it learned from
        them, were better than equal chances for all classes. 0 for a head that is no better, or worse."""
        self.settle()
        return (self._gain / math.log(self.classes)).clamp(0, 1)

    def log_probabilities(self, x_BD: Tensor) -> Tensor:
        """(B, C) float32, from all batches that were learned so far."""
        self.settle()
        self._move_to(x_BD.device)
        z_BD = (x_BD.to(torch.float32) - self._mean) / _scale(self._mean, self._variance)
        return (z_BD @ self._weights[:, :-1].T + self._weights[:, -1]).log_softmax(1)

    def learn(self, x_BD: Tensor, targets_BC: Tensor, labelled_B: Tensor, ranks: Ranks = ALONE) -> None:
        """One step of SGD on the mean cross-entropy of the labelled samples of all ranks.

        A step with a value that is not finite, on any rank, changes nothing. With several ranks nothing waits now.

        Args:
            targets_BC: probabilities.
            labelled_B: bool; the other samples count as nothing.
            ranks: each must call this equally often, and all end up with the same state, bit for bit.
        """
        labelled_B1 = labelled_B.to(torch.float32).unsqueeze(1)
        log_p_BC = self.log_probabilities(x_BD)
        surplus_BC = (log_p_BC.exp() - targets_BC) * labelled_B1
        gain_B1 = (targets_BC * (log_p_BC + math.log(self.classes))).sum(1, keepdim=True)
        # About the running mean, so that squares lose no digits.
        u_BX = torch.cat([x_BD.to(torch.float32) - self._mean, torch.ones_like(labelled_B1)], 1)
        # (C + 2, D + 1): the gradient; the sums of x and of the gain; those of its squares and of the samples.
        sums = torch.cat([u_BX[:, :-1], gain_B1], 1)
        packed = torch.cat([surplus_BC.T @ u_BX, labelled_B1.T @ sums, labelled_B1.T @ u_BX.square()])
        if ranks.size == 1:
            self._receive(packed)
        else:
            self._pending = ranks.sum(packed, self)

    def send_nothing(self, ranks: Ranks) -> None:
        """Called instead of `learn` on a rank that has no batches left."""
        self.settle()
        self._pending = ranks.sum(self._weights.new_zeros(self.classes + 2, self.inputs + 1), self)

    def settle(self) -> None:
        """Wait for the sum over ranks, and learn from it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._receive(pending.wait())

    def _receive(self, total: Tensor) -> None:
        finite = all_finite(total)
        self.refused.note(~finite)
        learns = finite & (total[-1, -1] > 0)
        average = total / total[-1, -1]
        rate = (1.0 / (self._batches + 1)).clamp_min(_NEWEST)
        moved_D = rate * average[-2, :-1]
        mean_D = self._mean + moved_D
        # Of the mixture of the past and this batch, about its own mean.
        variance_D = ((1 - rate) * self._variance + rate * average[-1, :-1] - moved_D.square()).clamp_min(0)
        surplus_C1 = average[:-2, -1:]
        gradient_CD = (average[:-2, :-1] - surplus_C1 * moved_D) / _scale(mean_D, variance_D)
        velocity = _MOMENTUM * self._velocity + torch.cat([gradient_CD, surplus_C1], 1)
        self._weights = torch.where(learns, self._weights - self.lr * velocity, self._weights)
        self._velocity = torch.where(learns, velocity, self._velocity)
        self._mean = torch.where(learns, mean_D, self._mean)
        self._variance = torch.where(learns, variance_D, self._variance)
        self._gain = torch.where(learns, (1 - rate) * self._gain + rate * average[-2, -1], self._gain)
        self._batches = self._batches + learns

    def _move_to(self, device: torch.device) -> None:
        if self._weights.device != device:
            for name, value in self._tensors().items():
                setattr(self, f"_{name}", value.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of fixed shapes, the same on all ranks."""
        self.settle()
        return self._tensors()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. A state that does not fit is an error and changes nothing."""
        mine = self._tensors()
        for name, value in mine.items():
            found = state.get(name)
            if not isinstance(found, Tensor) or found.shape != value.shape:
                raise ValueError(
                    f"the state of a head with {self.inputs} inputs and {self.classes} classes has a tensor {name!r} "
                    f"of shape {tuple(value.shape)}, this one has {getattr(found, 'shape', 'none')}"
                )
        self._pending = None
        for name, value in mine.items():
            setattr(self, f"_{name}", state[name].to(value.dtype, copy=True))

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "weights": self._weights,
            "velocity": self._velocity,
            "mean": self._mean,
            "variance": self._variance,
            "batches": self._batches,
            "gain": self._gain,
        }


def _scale(mean_D: Tensor, variance_D: Tensor) -> Tensor:
    """(D,) what inputs are divided by: their standard deviations, with a floor."""
    floor = _OF_VARIANCE * variance_D.mean() + _OF_SQUARE * mean_D.square().mean()
    return (variance_D + floor + torch.finfo(variance_D.dtype).tiny).sqrt()
