"""What is summed up between two lines of the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Round:
    """Sums over the current round. `loss` and `small`, the share of small losses, stay on the device."""

    loss: Tensor
    small: Tensor
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, loss: Tensor, seconds: float, waited: float) -> None:
        self.loss += loss
        self.steps += 1
        self.seconds += seconds
        self.waited += waited

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "loss": self.loss.cpu(), "small": self.small.cpu()}
