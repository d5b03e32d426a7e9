"""What a selector is told beside the features: ids and targets before its choice; after it the losses that the user
reports, and what enters the layer it watches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.interception import Interception
from ..modules import is_compiled
from ..selectors import Candidates, Selector
from ..selectors.base import aside
from ..selectors.tools.losses import per_sample


class Feedback:
    """Between a blocker's call and the next one.

    Args:
        selector: who is told.
        root: the innermost model.
        compiled: whether it is called through torch.compile.

    Attributes:
        watched: the module whose input the selector wants to see, if any.
    """

    def __init__(self, selector: Selector, root: nn.Module, compiled: bool) -> None:
        self._selector = selector
        self._root = root
        self.watched = selector.watches(root)
        self._compiled = compiled
        # The module that is watched in the model's own call, and those around it.
        noted = self.watched if selector.needs == "nothing" else None
        self._around = (
            [m for m in root.modules() if any(part is noted for part in m.modules())] if noted is not None else []
        )
        self._check_compiled()
        self._expected: tuple[Candidates, Tensor | None] | None = None
        self._noting: Interception | None = None
        self._told = False  # of the losses of this step
        self._steps = 0
        self._observed = self._warned = False

    def expect(self, candidates: Candidates, retained: Tensor | None) -> None:
        """A choice was made: what follows until the next is about these rows; all of them, if `retained` is None."""
        self._expected, self._told = (candidates, retained), False
        self._steps += 1
        if self.watched is not None and self._around:
            self._noting = Interception(self.watched, "_call_impl", self._entering)

    def forget(self) -> None:
        """The next step begins, or the blocker lets go of the model."""
        self._expected = None
        self._stop_noting()

    def observe(self, losses: Tensor) -> None:
        """Per-sample losses of the retained samples; once per step."""
        if self._selector.wants_losses == "no" or self._expected is None or self._told:
            return
        candidates, retained = self._expected
        per_sample(losses, candidates.size if retained is None else len(retained), "blocker.observe(losses)")
        self._told = self._observed = True
        with aside(losses.device):
            self._selector.observe(candidates, retained, losses.detach().float())

    def check(self, size: int, ids: Tensor | None, targets: Any) -> None:
        """Does the selector get what it cannot do without? Losses that never come are warned about, once."""
        selector = self._selector
        self._check_compiled()
        if ids is not None and (not isinstance(ids, Tensor) or ids.shape != (size,)):
            found = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(f"ids must be a tensor with one id per sample, shape ({size},), got {found}")
        if selector.wants_ids == "required" and ids is None:
            raise ValueError(
                f"the selector {selector.name!r} remembers samples by their ids: blocker(x, y, ids=ids), where "
                "halfway.WithIds(dataset) makes the data loader yield them"
            )
        if selector.wants_targets == "required" and targets is None:
            raise ValueError(
                f"the selector {selector.name!r} looks at targets, but finds none in the batch: blocker(x, y), or say "
                "where they are when it is made (target=...)"
            )
        if selector.wants_losses == "required" and self._steps and not (self._observed or self._warned):
            self._warned = True
            warnings.warn(
                f"the selector {selector.name!r} learns from losses, but got none: call blocker.observe(losses), with "
                "one loss per retained sample, after the loss. Without it samples are drawn at random",
                stacklevel=3,
            )

    def _entering(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Stands in for the watched module's call, until the model's own training call has come by."""
        expected = self._expected
        if expected and self._root.training and torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
            self._stop_noting()
            with aside(args[0].device):
                self._selector.note(*expected, args[0].detach())
        return original(*args, **kwargs)

    def _check_compiled(self) -> None:
        if self._around and (self._compiled or any(map(is_compiled, self._around))):
            raise TypeError(
                f"the selector {self._selector.name!r} watches a layer, which a compiled model does not show; compile "
                "other parts of the model only, or choose another selector"
            )

    def _stop_noting(self) -> None:
        if self._noting is not None:
            self._noting.remove()
            self._noting = None
