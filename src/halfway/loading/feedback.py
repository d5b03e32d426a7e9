"""What training shows a selector that decides before samples are loaded: losses, and what enters a layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.interception import Interception
from ..modules import unwrap
from ..selectors import Candidates, Selector
from ..selectors.base import aside
from ..selectors.tools.losses import per_sample
from .reports import Report, Reports


class Feedback:
    """Takes reports when they come, and lets the selector learn from them before a batch is drawn.

    Args:
        selector: who learns.
        lag: see `PrunedBatchSampler`.

    Attributes:
        largest_lag: how many batches old what was known at a draw has been at most.
    """

    def __init__(self, selector: Selector, lag: int | None) -> None:
        self._selector = selector
        self._lag = lag
        self._reports = Reports()
        self._entered: list[Tensor] = []
        self._watching: Interception | None = None
        self._observed = self._warned = False
        self._draws = 0  # since it was made, or a state was loaded
        self.largest_lag = 0

    @property
    def arrived(self) -> int:
        """Reports in this epoch."""
        return self._reports.arrived

    def observe(self, ids: Tensor, losses: Tensor | None) -> None:
        """See `PrunedBatchSampler.observe`."""
        if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(f"ids must be a tensor of whole numbers, one per sample, shape (S,), got {found}")
        if losses is not None:
            per_sample(losses, len(ids), "batches.observe(ids, losses)")
        elif self._selector.wants_losses == "required":
            raise ValueError(f"the selector {self._selector.name!r} learns from losses: batches.observe(ids, losses)")
        watched = self._entered.pop() if self._entered else None
        if self._watching is not None and watched is None:
            raise RuntimeError(
                "the watched model was not called in training mode since the last batches.observe: call it after the "
                "model, once for each batch"
            )
        if watched is not None and len(watched) != len(ids):
            raise ValueError(f"the model was last called on {len(watched)} samples, but these are {len(ids)} ids")
        self._observed = True
        if self._takes_reports:
            self._reports.add(Report(ids, None if losses is None else losses.float(), watched))

    def watch(self, model: nn.Module) -> None:
        """See `PrunedBatchSampler.watch`."""
        root, compiled = unwrap(model)
        watched = self._selector.watches(root)
        if watched is None:
            raise ValueError(f"the selector {self._selector.name!r} does not learn from the model: nothing to watch")
        if compiled:
            raise TypeError(
                f"the selector {self._selector.name!r} watches a layer, which a compiled model does not show; compile "
                "other parts of the model only, or choose another selector"
            )
        if self._watching is not None:
            raise RuntimeError("a model is being watched already")
        entered = self._entered

        def entering(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if root.training and torch.is_grad_enabled() and args:
                entered[:] = [args[0].detach()]
            return original(*args, **kwargs)

        self._watching = Interception(watched, "_call_impl", entering)

    def check_watched(self) -> None:
        """Raise if the selector would have to learn from a model, and was shown none."""
        if type(self._selector).watches is not Selector.watches and self._watching is None:
            raise RuntimeError(
                f"the selector {self._selector.name!r} learns from the model: call batches.watch(model) before the "
                "loop, and batches.observe(ids, losses) in it"
            )

    def learn(self, candidates_of: Callable[[Tensor, torch.Generator], Candidates], before: int | None = None) -> None:
        """From the reports that the draw of batch `before` may know; None: from all that have arrived."""
        until = None
        self._draws += before is not None
        if before is not None and self._takes_reports:
            behind = before + 1 - self.arrived
            if self._lag is not None:
                until = max(0, before + 1 - self._lag)
                if self.arrived < until:
                    raise RuntimeError(
                        f"lag={self._lag}, but batch {before} is drawn when {self.arrived} batches of this epoch have "
                        f"been observed; pass lag={behind} at least (num_workers * prefetch_factor + 1 of a plain "
                        "DataLoader), and call batches.observe once for each batch"
                    )
            self.largest_lag = max(self.largest_lag, min(behind if self._observed else 0, before + 1))
        for report in self._reports.take(until):
            candidates = candidates_of(report.ids.to(torch.int64), torch.Generator("cpu"))
            with aside(candidates.generator.device):
                if report.watched is not None:
                    self._selector.note(candidates, None, report.watched)
                if report.losses is not None:
                    self._selector.observe(candidates, None, report.losses)

    def new_epoch(self) -> None:
        """All reports were taken. Warns, once, if there were none so far and the selector needs them."""
        if self._selector.wants_losses == "required" and self._draws and not (self._observed or self._warned):
            self._warned = True
            warnings.warn(
                f"the selector {self._selector.name!r} learns from losses, but got none in the last epoch: call "
                "batches.observe(ids, losses) after the loss, with one loss per sample. Without it the draw is random",
                stacklevel=4,
            )
        self._reports.new_epoch()

    def state_dict(self) -> dict[str, Any]:
        """As two entries of the sampler's state."""
        return {"reports": self._reports.state_dict(), "lag": self.largest_lag}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reports.load_state_dict(state["reports"])
        self.largest_lag = int(state["lag"])
        self._observed, self._warned, self._draws = self.arrived > 0, False, 0

    def close(self) -> None:
        """Let go of the watched model."""
        if self._watching is not None:
            self._watching.remove()
            self._watching = None

    @property
    def _takes_reports(self) -> bool:
        """Whether the selector learns from what training shows."""
        return self._selector.wants_losses != "no" or self._watching is not None
