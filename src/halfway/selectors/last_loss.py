"""The last known loss of each sample: decided before the model runs, for nothing."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..state.ranks import Ranks
from ..state.sample_memory import SampleMemory
from .base import Candidates, Ranking, retained_rows
from .tools.draw import gumbel
from .tools.pivotal import standardised

Mode = Literal["hard", "soft"]
# Log-losses are taken of at least this share of the batch's mean loss: a loss of 0 is small, not infinitely so.
_SMALLEST = 1e-6
# What to say about observed losses that are not finite.
LOSSES_NOT_FINITE = (
    "blocker.observe got losses that are not finite (NaN or infinite). The samples they belong to count as unknown; "
    "the training itself has probably diverged: lower the learning rate, clip gradients, or check the inputs"
)


class LastLoss(Ranking):
    """Prefers samples whose loss was large when they were last trained on.

    What: "hard" retains the S largest last losses. "soft" draws S without replacement, one after the other, with
        probabilities proportional to exp(z_i / temperature), where z is the logarithm of the last loss, standardised
        over the batch (Gumbel top-k); losses below a millionth of the batch's mean, 0 and negative ones too, count as
        that. A sample without a known loss counts as average; equals are drawn at random.
    Source: hard: Loshchilov & Hutter, "Online Batch Selection for Faster Training of Neural Networks", 2016, who rank
        all samples by it; soft: ours.
    Cost: 1 - p, nothing is run on pruned samples. 4 bytes per sample of the data set, and `blocker.observe(losses)`.
    Caveats: prefers outliers and wrong labels. A pruned sample keeps its old loss, so that "hard" may never come back
        to an easy one.

    Args:
        mode: "soft" (default) or "hard".
        temperature: of "soft": small is hard, large is random.
        num_samples: size of the data set, see `SampleMemory`.
    """

    name = "last_loss"
    wants_ids = "required"
    wants_losses = "required"

    def __init__(self, mode: Mode = "soft", temperature: float = 1.0, num_samples: int | None = None) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise ValueError(f"unknown mode {mode!r}; choose one of {get_args(Mode)}")
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.mode = mode
        self.temperature = temperature
        self._losses = SampleMemory(1, num_samples)
        self._bad_losses: Tensor | None = None

    def importance(self, candidates: Candidates) -> Tensor:
        assert candidates.ids is not None, "the blocker passes ids to a selector that requires them"
        losses_B = self._losses.read(candidates.ids, candidates.generator.device).squeeze(1)
        known_B = losses_B.isfinite()
        mean = torch.where(known_B, losses_B, 0.0).sum() / known_B.sum().clamp_min(1)
        losses_B = torch.where(known_B, losses_B, mean)
        if self.mode == "hard":
            return _without_ties(losses_B, candidates.generator)
        log_B = losses_B.clamp_min(_SMALLEST * mean.abs()).clamp_min(1e-30).log()
        z_B = standardised(log_B.unsqueeze(1), known_B).squeeze(1)
        return gumbel(z_B / self.temperature, candidates.generator)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        assert candidates.ids is not None, "the blocker passes ids to a selector that requires them"
        bad = ~losses.isfinite().all()
        self._bad_losses = bad if self._bad_losses is None else self._bad_losses | bad
        ids = retained_rows(candidates.ids.to(losses.device, non_blocking=True), retained)
        self._losses.write(ids, losses, candidates.ranks, candidates.size)

    def learn_nothing(self, ranks: Ranks) -> None:
        self._losses.write_nothing(ranks, optional=True)

    def check(self) -> None:
        self._losses.check()
        super().check()
        found, self._bad_losses = self._bad_losses, None
        if found is not None and found:
            raise FloatingPointError(LOSSES_NOT_FINITE)

    def config(self) -> dict[str, Any]:
        return {"mode": self.mode, "temperature": self.temperature, "num_samples": self._losses.num_samples}

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self._losses.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.load_state_dict({"values": state.get("losses")})


def _without_ties(losses_B: Tensor, generator: torch.Generator) -> Tensor:
    """(B,) float64: float32 losses in the same order, but equal ones, 0 too, in random order."""
    u_B = torch.rand(len(losses_B), generator=generator, device=losses_B.device, dtype=torch.float64)
    losses_B = losses_B.to(torch.float64)
    # Less than the distance between any two float32 numbers, the smallest ones included.
    return losses_B + (1e-9 * losses_B.abs() + 1e-46) * u_B
