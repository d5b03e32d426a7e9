"""RS2: another random subset every epoch."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import torch

from ..state.sample_memory import SampleMemory
from .base import Common, Decision, EpochSampler, ids_of_highest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RS2(EpochSampler):
    """Repeated sampling of random subsets: the rival to beat.

    What: every epoch retains N - round(p N) samples, drawn uniformly and without repeats within the epoch. With
    `replacement` each epoch draws from all samples. Without, it draws from those that have been used least, so that
    every sample is used before any is used again: consecutive parts of one permutation after the other.

    Source: Okanovic et al., "Repeated Random Sampling for Minimizing the Time-to-Accuracy of Learning", ICLR 2024.
    Hyper-parameters: replacement = True.
    Cost: nothing per step, a permutation of N per epoch; 4 bytes per sample without replacement.

    Deviations: where a part spans two permutations, the second is drawn so that no sample occurs twice in that epoch.
    Caveats: use outside the schedule's window does not count (all samples are used equally there).
    """

    name = "rs2"

    def __init__(
        self, data: int | Sized, prune_ratio: float, *, replacement: bool = True, **common: Unpack[Common]
    ) -> None:
        self.replacement = bool(replacement)
        super().__init__(data, prune_ratio, **common)
        if not self.replacement:
            self.memory = SampleMemory(1, self.num_samples, unknown=0.0)

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        if self.memory is None:
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
            return Decision(order[: self.retained_count].sort().values)
        used_N = self.memory.values.squeeze(1)
        retained = ids_of_highest(-used_N, self.retained_count, generator)
        # No exchange between ranks: each makes the same decision.
        self.memory.write(retained, used_N[retained] + 1)
        return Decision(retained)
