"""When to prune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .settings import whole


@dataclass(frozen=True)
class Schedule:
    """Prunes in [start, stop), counted in epochs or in training batches.

    The paper leaves the first epochs alone, while features are still noise, and lets the last ones see all data:
    5-180 of 200 on CIFAR, 5-80 of 90 for ResNet-50 and 15-265 of 300 for Swin-T on ImageNet.

    Args:
        start: first epoch (or step) in which samples are pruned.
        stop: first epoch (or step) in which they no longer are; None: prune to the end.
        unit: "epoch" needs `blocker.set_epoch(epoch)` in the loop; "step" counts the blocker's training batches.
    """

    start: int = 0
    stop: int | None = None
    unit: Literal["epoch", "step"] = "epoch"

    def __post_init__(self) -> None:
        if self.unit not in ("epoch", "step"):
            raise ValueError(f"unit must be 'epoch' or 'step', got {self.unit!r}")
        object.__setattr__(self, "start", self._whole("start", self.start))
        if self.stop is not None:
            object.__setattr__(self, "stop", self._whole("stop", self.stop))
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}")
        if self.stop is not None and self.stop < self.start:
            raise ValueError(f"stop ({self.stop}) lies before start ({self.start})")

    def _whole(self, name: str, value: Any) -> int:
        try:
            return whole(name, value)
        except TypeError as error:
            raise TypeError(
                f"{error}; it counts {self.unit}s. For a share of the run multiply by its length: "
                f"Schedule(int(0.1 * {self.unit}s), int(0.9 * {self.unit}s))"
            ) from None

    @property
    def always(self) -> bool:
        """Whether it prunes from the first step to the last, so that nothing needs counting."""
        return self.start == 0 and self.stop is None

    def active(self, at: int) -> bool:
        """Whether samples are pruned in epoch (or step) `at`."""
        return at >= self.start and (self.stop is None or at < self.stop)

    def meets(self, first: int, end: int) -> bool:
        """Whether samples are pruned in any epoch (or step) of [first, end)."""
        return max(first, self.start) < (end if self.stop is None else min(end, self.stop))

    def share(self, length: int) -> float:
        """The part of a run of `length` epochs (or steps) in which samples are pruned."""
        if length < 1:
            raise ValueError(f"length must be at least 1 {self.unit}, got {length}")
        stop = length if self.stop is None else min(self.stop, length)
        return max(0, stop - self.start) / length


def check_schedule(schedule: Any) -> None:
    """Raise unless this is a `Schedule` or None."""
    if schedule is None or isinstance(schedule, Schedule):
        return
    window = ", ".join(map(repr, schedule)) if isinstance(schedule, (tuple, list)) else "start, stop"
    raise TypeError(f"schedule must be a halfway.Schedule, as Schedule({window}), got {schedule!r}")
