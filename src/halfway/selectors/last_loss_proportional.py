"""Draws in proportion to the last known loss, on its own scale. Decided before the model runs, at no cost."""

from __future__ import annotations

from torch import Tensor

from .base import Candidates, Selection, Selector
from .tools.draw import systematic
from .tools.last_losses import LastLosses
from .tools.proportional import Proportions, Scale


class LastLossProportional(Selector):
    """Draws samples with probabilities proportional to the loss they had when they were last trained on.

    What: sample i stays with probability exactly min(1, c w_i), where c makes them add up to S (systematic sampling in
        random order). w = (g + floor x mean g)^(1 / temperature), with g the last loss, or the bounded 1 - exp(-loss).
        The mean is that of the batch's known losses, which is also the g of a sample without one. While all losses are
        of one size the draw is nearly random; once most of them are near zero it prefers the others, by as much.
    Source: ours, after Loshchilov & Hutter, "Online Batch Selection for Faster Training of Neural Networks", 2016.
        `LastLoss` standardises the losses over the batch instead, and its Gumbel draw has flatter probabilities.
    Cost: 1 - p, nothing is run on pruned samples. 4 bytes per sample of the data set, and `blocker.observe(losses)`.
    Caveats: prefers outliers and wrong labels, unless `cap` takes them for average. A pruned sample keeps its old loss.
        Observe the plain loss: label smoothing puts a floor under all of them, and flattens the scale.

    Args:
        scale: "loss", or "bounded": 1 - exp(-loss), with which the largest losses differ little.
        floor: every sample gets this much of the mean on top, so that none is forgotten.
        temperature: small is like `LastLossHard`, large is random.
        cap: a loss above it counts as average: a number; "chance", ln(num_classes); None: no cap.
        num_classes: of the task, for `cap="chance"`.
        num_samples: size of the data set, see `SampleMemory`.
    """

    name = "last_loss_proportional"
    wants_ids = "required"
    wants_losses = "required"

    def __init__(
        self,
        scale: Scale = "loss",
        floor: float = 0.1,
        temperature: float = 1.0,
        cap: float | str | None = None,
        num_classes: int | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.proportions = Proportions(scale, floor, temperature, cap, num_classes)
        self._losses = self.remember("losses", LastLosses(num_samples))

    def select(self, candidates: Candidates, count: int) -> Selection:
        pi_B = self.proportions.probabilities(self._losses.of(candidates), count)
        return Selection(systematic(pi_B, count, candidates.generator), pi_B)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        self._losses.observe(candidates, retained, losses)
