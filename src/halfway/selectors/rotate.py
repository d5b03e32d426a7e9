"""Random without repetition: the sample that has waited longest goes first."""

from __future__ import annotations

import torch
from torch import Tensor

from ..state.sample_memory import SampleMemory
from .base import Candidates, Ranking


class Rotate(Ranking):
    """Retains the samples that were pruned most often in a row; ties are broken at random.

    What: w_i counts how often a sample was offered since it was last retained; the S largest w_i + u_i stay, with u_i
        uniform in [0, 1). Over the epochs every sample is used about equally often, which random pruning leaves to
        chance.
    Source: sampling without replacement across epochs, a variant of Okanovic et al., "Repeated Sampling of Random
        Subsets", which does it with whole epochs; doing it within batches is ours.
    Cost: 1 - p, nothing is run on pruned samples. 4 bytes per sample of the data set.
    Caveats: needs ids. Use is not exactly equal: which samples meet in a batch is chance, and only the wait since the
        last use counts, not all uses. The less is pruned, the less it evens out: the number of uses has about half the
        variance of random pruning at p = 0.3, and a tenth at p = 0.5 (test_rotate.py).

    Args:
        num_samples: size of the data set, see `SampleMemory`.
    """

    name = "rotate"
    wants_ids = "required"

    def __init__(self, num_samples: int | None = None) -> None:
        self._waited = self.remember("waited", SampleMemory(1, num_samples, unknown=0.0))

    def importance(self, candidates: Candidates) -> Tensor:
        generator = candidates.generator
        chance_B = torch.rand(candidates.size, generator=generator, device=generator.device)
        # In float64 the sum is exact; in float32 it may round up to the next whole number.
        return self._waiting(candidates).to(torch.float64) + chance_B

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        waited_B = self._waiting(candidates) + 1
        waited_B = torch.zeros_like(waited_B) if retained is None else waited_B.index_fill(0, retained, 0.0)
        self._waited.write(candidates.required_ids, waited_B, candidates.ranks, candidates.size)

    def _waiting(self, candidates: Candidates) -> Tensor:
        return self._waited.read(candidates.required_ids, candidates.generator.device).squeeze(1)
