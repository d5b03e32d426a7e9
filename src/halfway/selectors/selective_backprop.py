"""Selective-Backprop: the larger a loss among the recent ones, the likelier the sample is to be retained.

Shape suffixes: B batch, S retained, H history, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..state.ranks import PendingSum, Ranks
from .base import Candidates, OutputRanking, Selection
from .tools.draw import inclusion_probabilities, systematic
from .tools.losses import LossFunction


class SelectiveBackprop(OutputRanking):
    """Draw samples with a probability that grows as a power of their loss's percentile among the recent losses.

    What: u_i in (0, 1) is the percentile of the i-th loss in the history, and the sample is retained with a probability
        proportional to u_i^beta (at most 1), so that exactly S of B are. With beta = p / (1 - p), p = 1 - S/B, the
        acceptance is u^beta itself on average, because the mean of u^beta over uniform u is 1 - p.
    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019. They flip a coin per
        sample, so that the number retained varies, and collect the retained into batches of constant size; their
        history includes the batch itself; their code leaves the first epoch alone (here: `Schedule(start=1)`). Here the
        number is exact, and the history ends before the batch.
    Cost: the forward pass of all samples, see `OutputRanking`.
    Caveats: prefers outliers and wrong labels; the mean of the retained losses is not that of the batch.

    Args:
        beta: how selective; 0 is uniform. None (default): p / (1 - p), with the p of each batch.
        history: H, how many of the last losses are remembered, of all samples offered on all ranks (authors: 1024).
            While it is empty, the batch itself is the history.
        loss_fn, target: see `OutputRanking`.
    """

    name = "selective_backprop"

    def __init__(
        self,
        beta: float | None = None,
        history: int = 1024,
        loss_fn: LossFunction | None = None,
        target: int | str | None = None,
    ) -> None:
        super().__init__(loss_fn, target)
        if beta is not None and not 0 <= beta < float("inf"):
            raise ValueError(f"beta is a power and must not be negative, got {beta}")
        if history < 1:
            raise ValueError(f"history, the number of losses to remember, must be at least 1, got {history}")
        self.beta = beta
        self.history = history
        self._history = LossHistory(history)
        self._computed: tuple[Candidates, Tensor] | None = None

    def importance(self, candidates: Candidates) -> Tensor:
        """(B,) float64: percentiles in (0, 1); NaN for a loss that is not finite."""
        losses_B = self._losses_of(candidates)
        losses_H = self._history.read(losses_B.device)
        known_H = losses_H.isfinite()
        past_B = _percentiles(losses_B, torch.where(known_H, losses_H, torch.inf), known_H.sum())
        # Without a history: the percentile among the other samples of the batch.
        own_B = _percentiles(losses_B, losses_B, candidates.size - 1, own=1)
        return torch.where(losses_B.isfinite(), torch.where(known_H.any(), past_B, own_B), torch.nan)

    def select(self, candidates: Candidates, count: int) -> Selection:
        u_B = self.finite_or_random(self.importance(candidates), candidates)
        beta = (candidates.size - count) / count if self.beta is None else self.beta
        pi_B = inclusion_probabilities(u_B**beta, count)
        return Selection(systematic(pi_B, count, candidates.generator), u_B.float())

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        losses_B = self._losses_of(candidates)
        self._computed = None
        # Nothing is learned from a step with any value that is not finite.
        self._history.add(torch.where(functional.all_finite(losses_B), losses_B, torch.nan), candidates.ranks)

    def check(self) -> None:
        self._history.settle()
        super().check()

    def state_dict(self) -> dict[str, Any]:
        """One tensor (H,), the same on all ranks."""
        return {"losses": self._history.read().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        losses_H = state.get("losses") if isinstance(state, dict) else None
        if not isinstance(losses_H, Tensor) or losses_H.shape != (self.history,):
            raise ValueError(f"the state of selective_backprop is a tensor 'losses' of shape ({self.history},)")
        self._history.replace(losses_H)

    def _losses_of(self, candidates: Candidates) -> Tensor:
        """(B,) float32, computed once for choosing and learning."""
        if self._computed is None or self._computed[0] is not candidates:
            self._computed = (candidates, self.losses(candidates).detach())
        return self._computed[1]


class LossHistory:
    """The last losses of all samples offered on all ranks; the same on every rank.

    Args:
        length: H, how many.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        # Oldest first, padded with NaN in front while there are fewer than H.
        self._losses_H = torch.full((length,), float("nan"), device="cpu", dtype=torch.float32)
        self._pending: PendingSum | None = None

    def read(self, device: torch.device | None = None) -> Tensor:
        """(H,), oldest first, padded with NaN in front while there are fewer; from now on kept on `device`."""
        self.settle()
        if device is not None and self._losses_H.device != device:
            self._losses_H = self._losses_H.to(device)
        return self._losses_H

    def add(self, losses: Tensor, ranks: Ranks) -> None:
        """Add the losses (B,) of all ranks. With several ranks nothing waits now."""
        self.read(losses.device)
        if ranks.size == 1:
            self._append(losses)
            return
        # Each rank has a share of the history to fill, so that messages have the same size whatever the batches.
        share = -(-self.length // ranks.size)
        offer_RX = losses.new_zeros(ranks.size, share)
        offer_RX[ranks.rank] = torch.nan
        offer_RX[ranks.rank, : len(losses)] = losses[-share:]
        self._pending = ranks.sum(offer_RX, self)

    def send_nothing(self, ranks: Ranks) -> None:
        """Called instead of `add` on a rank that has no batches left."""
        self.add(self._losses_H[:0], ranks)

    def settle(self) -> None:
        """Wait for what the ranks have sent each other, and store it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            # One loss of each rank in turn, so that no rank's losses are forgotten first.
            self._append(pending.wait().T.flatten())

    def replace(self, losses_H: Tensor) -> None:
        """Replace the whole history by these (H,)."""
        self._pending = None
        self._losses_H = losses_H.to(torch.float32, copy=True)

    def _append(self, losses: Tensor) -> None:
        """Keep the last H finite losses. A stable sort moves the others to the front, so no shape depends on data."""
        both = torch.cat([self._losses_H.to(losses), losses])
        order = both.isfinite().to(torch.uint8).argsort(stable=True)
        self._losses_H = torch.where(both.isfinite(), both, torch.nan)[order[-self.length :]]


def _percentiles(losses_B: Tensor, history: Tensor, known: Tensor | int, own: int = 0) -> Tensor:
    """(B,) float64: where each loss stands among the known ones, (rank + 1/2) / (known + 1); ties share their ranks.

    A loss from the same distribution is then uniform on the midpoints of known + 1 equal parts of (0, 1).

    Args:
        history: the known losses, and perhaps infinite ones.
        known: how many are known.
        own: 1 if each loss is itself in the history and must not be compared with itself.
    """
    ordered = history.sort().values
    below_B = torch.searchsorted(ordered, losses_B, right=False)
    not_above_B = torch.searchsorted(ordered, losses_B, right=True) - own
    return (0.5 * (below_B + not_above_B).to(torch.float64) + 0.5) / (known + 1)
