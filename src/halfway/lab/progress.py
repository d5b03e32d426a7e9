"""Progress bars: redrawn often on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any


class Bar:
    """A tqdm bar with figures that are only worked out when they are about to be shown.

    Args:
        total: steps, images, ...; None: not known.
        name: what is going on.
        show: False on all ranks but the first.
        done: of the total, by an earlier session.
        delay: seconds before anything is shown, for what mostly takes a moment only.
        scale: write 1.2M instead of 1200000.
    """

    def __init__(
        self,
        total: int | None,
        name: str,
        unit: str,
        show: bool = True,
        leave: bool = True,
        done: int = 0,
        delay: float = 0.0,
        scale: bool = False,
    ) -> None:
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self._interval = 0.5 if terminal else 10.0
        self._next = time.monotonic() + self._interval
        self._bar: Any = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit=unit,
            disable=not show,
            leave=leave and terminal,
            mininterval=self._interval,
            delay=delay,
            unit_scale=scale,
            dynamic_ncols=True,
        )

    @property
    def due(self) -> bool:
        """Whether figures should be worked out now; at most once per interval."""
        if self._bar.disable or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._interval
        return True

    def figures(self, **figures: str) -> None:
        """Show figures beside the bar."""
        self._bar.set_postfix(figures, refresh=False)

    def update(self, count: int = 1) -> None:
        self._bar.update(count)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
