"""Prefers samples whose last known loss was large. Decided before the model runs, at no cost."""

from __future__ import annotations

from torch import Tensor

from .base import Candidates, Ranking
from .tools.draw import gumbel
from .tools.last_losses import LastLosses, known_or_mean
from .tools.pivotal import standardised

# Losses are raised to at least this share of the batch's mean before the logarithm, so that 0 is not infinitely small.
_SMALLEST = 1e-6


class LastLoss(Ranking):
    """Draws samples, preferring those whose loss was large when they were last trained on.

    What: S are drawn without replacement, one after the other, with probabilities proportional to
        exp(z_i / temperature), where z is the logarithm of the last loss, standardised over the batch (Gumbel top-k).
        Losses below a millionth of the batch's mean, including 0 and negative ones, count as that much. A sample
        without a known loss counts as average.
    Source: ours, after Loshchilov & Hutter, "Online Batch Selection for Faster Training of Neural Networks", 2016.
    Cost: 1 - p, nothing is run on pruned samples. 4 bytes per sample of the data set, and `blocker.observe(losses)`.
    Caveats: prefers outliers and wrong labels. A pruned sample keeps its old loss.

    Args:
        temperature: small is like `LastLossHard`, large is random.
        num_samples: size of the data set, see `SampleMemory`.
    """

    name = "last_loss"
    wants_ids = "required"
    wants_losses = "required"

    def __init__(self, temperature: float = 1.0, num_samples: int | None = None) -> None:
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = temperature
        self._losses = self.remember("losses", LastLosses(num_samples))

    def importance(self, candidates: Candidates) -> Tensor:
        losses_B, mean, known_B = known_or_mean(self._losses.of(candidates))
        log_B = losses_B.clamp_min(_SMALLEST * mean.abs()).clamp_min(1e-30).log()
        z_B = standardised(log_B.unsqueeze(1), known_B).squeeze(1)
        return gumbel(z_B / self.temperature, candidates.generator)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        self._losses.observe(candidates, retained, losses)
