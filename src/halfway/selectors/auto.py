"""Random pruning, and a draw by losses while that has paid in our measurements. Decided before the model runs.

Shape suffixes: N samples of the data set, B candidates, S retained.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..state.sample_memory import SampleMemory
from .base import Candidates, Selection, Selector, random_rows, retained_rows
from .tools.class_targets import ClassTargets
from .tools.draw import inclusion_probabilities, systematic
from .tools.last_losses import LastLosses
from .tools.proportional import weights

# A sample counts as learned if the model gave its class a better than even chance.
_LEARNED_BELOW = math.log(2)


class Auto(Selector):
    """Draws at random, and by capped losses as long as most samples are learned and were trained on a few times.

    What: two figures decide about each step, both of the samples that were trained on so far: the share whose last
        loss was below ln 2, and how often each was trained on, in the mean. If the share is at least `learned` and the
        mean at most `times`, samples are drawn as `LastLossProportional(floor=1, cap="chance")` draws them. Otherwise
        they are exactly those that `Random` draws with this seed. `stats.explanation` says which of the two, and why.
    Source: ours. On the map (results/README.md) such a draw gained where many images are seen a few times and mostly
        learned, also with wrong labels; it was told apart from random pruning nowhere else, or lost to it: with few
        images, seen so often that training fits all of them, large losses are what the network is about to memorise.
    Cost: 1 - p, nothing is run on pruned samples. 8 bytes per sample of the data set, two sums over them in each step,
        and `blocker.observe(losses)`.
    Caveats: for classification, with plain losses: label smoothing puts a floor under all of them. The two limits come
        from small networks on CIFAR-10 and Fashion-MNIST; with stronger augmentation `times` may well be too careful.
        With wrong labels more answers were right, at a worse test loss.

    Args:
        learned: the share from which on losses decide.
        times: the mean number of times a sample was trained on up to which they do.
        floor: see `LastLossProportional`.
        num_samples: size of the data set, see `SampleMemory`.
        target: which part of the batch holds the classes, see `ClassBalanced`. The largest class of a batch says what
            the loss of a guess is, above which a loss counts as average.
    """

    name = "auto"
    wants_ids = "required"
    wants_targets = "required"
    wants_losses = "required"

    def __init__(
        self,
        learned: float = 0.6,
        times: float = 6.0,
        floor: float = 1.0,
        num_samples: int | None = None,
        target: int | str | None = None,
    ) -> None:
        if not 0 <= learned <= 1:
            raise ValueError(f"learned is a share of the samples and must lie in [0, 1], got {learned}")
        if not times > 0:
            raise ValueError(f"times is how often a sample may be trained on and must be positive, got {times}")
        if not 0 <= floor < math.inf:
            raise ValueError(f"floor is a share of the mean and must not be negative, got {floor}")
        self.learned = learned
        self.times = times
        self.floor = floor
        self.target = target
        self._losses = self.remember("losses", LastLosses(num_samples))
        self._times = self.remember("times", SampleMemory(1, num_samples, unknown=0.0))
        self._classes = ClassTargets(self)
        self._forget_choices()

    def _forget_choices(self) -> None:
        self._steps, self._steps_by_loss = 0, torch.zeros((), dtype=torch.int64, device="cpu")
        self._figures: tuple[Tensor, Tensor, Tensor] | None = None

    def select(self, candidates: Candidates, count: int) -> Selection:
        random_S = random_rows(candidates, count).indices  # first, so that they are those of `Random`
        chance = (self._classes.of(candidates).amax() + 1).clamp_min(2).to(torch.float64).log()
        w_B = weights(self._losses.of(candidates), floor=self.floor, cap=chance)
        pi_B = inclusion_probabilities(w_B, count, smallest=0.0)
        by_loss_S = systematic(pi_B, count, candidates.generator)
        pays = self._pays(random_S.device)
        pi_B = torch.where(pays, pi_B, count / candidates.size)
        return Selection(torch.where(pays, by_loss_S, random_S), pi_B)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        self._losses.observe(candidates, retained, losses)
        ids_S = retained_rows(candidates.required_ids.to(losses.device, non_blocking=True), retained)
        sorted_S = ids_S.sort().values  # a sample may come several times, augmented in as many ways
        more_S = torch.searchsorted(sorted_S, ids_S, right=True) - torch.searchsorted(sorted_S, ids_S)
        times_S = self._times.read(ids_S, losses.device).squeeze(1) + more_S
        self._times.write(ids_S, times_S, candidates.ranks, candidates.size, among=candidates.required_ids)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._forget_choices()

    def check(self) -> None:
        super().check()
        self._classes.check()

    def diagnostics(self) -> dict[str, float]:
        """Of the last choice: both figures. And the share of the steps so far in which losses decided."""
        if self._figures is None:
            return {}
        learned, times, _ = (float(each) for each in self._figures)
        return {"learned": learned, "times": times, "chosen_by_loss": float(self._steps_by_loss) / self._steps}

    def explanation(self) -> str:
        if self._figures is None:
            return ""
        learned, times, pays = (each.item() for each in self._figures)
        how = "by capped losses" if pays else "at random"
        return (
            f"draws {how}: {learned:.1%} of the samples trained on so far are learned (losses decide from "
            f"{self.learned:.0%} on), after {times:.2f} trainings on each (and up to {self.times:g})"
        )

    def _pays(self, device: torch.device) -> Tensor:
        """() bool: whether losses decide. The same on all ranks, since all remember the same."""
        losses_N, times_N = (memory.values.to(device) for memory in (self._losses, self._times))
        known = (times_N > 0).sum().clamp_min(1)
        learned, times = (losses_N < _LEARNED_BELOW).sum() / known, times_N.sum() / known
        pays = (learned >= self.learned) & (times <= self.times)
        self._figures = learned, times, pays
        self._steps, self._steps_by_loss = self._steps + 1, self._steps_by_loss.to(device) + pays
        return pays
