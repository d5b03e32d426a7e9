"""A sample's weight travels with its index: from the sampler through any number of workers into the batch.

A re-weighting method must multiply each loss by its sample's factor, but a data loader does not say which samples a
batch was made of, and with workers it runs several batches ahead of the loop. So the sampler yields indices that carry
their weight, and the data set passes both on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from ..batches.batch import WithIds


class Index(int):
    """A sample's position in the data set: an int with a `weight`."""

    weight: float

    def __new__(cls, value: int, weight: float = 1.0) -> Index:
        self = super().__new__(cls, value)
        self.weight = weight
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.weight)


class WithWeights(WithIds):
    """A map-style data set that also yields each sample's index and its weight, for a sampler that gives some: an
    `EpochSampler`, or a `PrunedBatchSampler` with a selector that re-weights.

    A tuple gets the two as further entries, a mapping gets "ids" and "weights", anything else becomes
    (item, index, weight). Weights are () float32, so that a batch has them as (B,) float32; 1 for a plain int as index.

        loader = DataLoader(halfway.samplers.WithWeights(dataset), batch_size=128, sampler=sampler, num_workers=8)
        for x, y, ids, weights in loader:
            losses = F.cross_entropy(model(x), y, reduction="none")
            sampler.observe(ids, losses)
            (weights * losses).mean().backward()

    It must be the outermost data set: one around it (`Subset`) would translate the index and lose the weight.
    """

    def __init__(self, dataset: Dataset) -> None:
        if isinstance(dataset, WithIds):
            raise TypeError("WithWeights yields ids itself; pass it the data set that was given to WithIds")
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError("WithWeights needs a map-style data set, with __getitem__ and __len__")
        super().__init__(dataset)

    def __getitem__(self, index: int) -> Any:
        # A tensor, because a data loader collates Python floats to float64, which would make the loss float64.
        weight = torch.tensor(getattr(index, "weight", 1.0), dtype=torch.float32, device="cpu")
        item = super().__getitem__(int(index))
        if isinstance(item, Mapping):
            if "weights" in item:
                raise ValueError(
                    "the data set already yields an entry 'weights'; rename it, or use WithIds and sampler.weights(ids)"
                )
            return {**item, "weights": weight}
        return (*item, weight)
