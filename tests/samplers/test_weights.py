"""Ids and weights through data sets and loaders."""

from __future__ import annotations

import copy
import math
import pickle

import torch
from torch.utils.data import DataLoader, Subset

from halfway import WithIds
from halfway.samplers import (
    Index,
    InfoBatch,
    WithWeights,
)
from tests.helpers.sampled import N, Squares


def test_ids_and_weights_come_right_through_persistent_workers_and_losses_change_the_next_epoch() -> None:
    sampler = InfoBatch(Squares(), 0.5, threshold=0.5)
    loader = DataLoader(WithWeights(Squares()), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    # Losses grow with the id and then fall with it: the candidates are the lower half, then the upper one.
    for epoch, (sign, low) in enumerate([(1.0, set()), (-1.0, set(range(15))), (1.0, set(range(15, N)))]):
        sampler.set_epoch(epoch)
        expected, met, pruned = list(sampler), [], set(range(N)) - set(sampler.retained.tolist())
        assert len(loader) == math.ceil(len(expected) / 4)
        for x, y, ids, weights in loader:
            assert torch.equal(x, ids.float() ** 2)
            assert torch.equal(y, -ids)
            assert weights.dtype == torch.float32
            assert torch.equal(weights, sampler.weights(ids))
            assert weights.tolist() == [2.0 if i in low else 1.0 for i in ids.tolist()]
            sampler.observe(ids, sign * ids.float() + 100)
            met += ids.tolist()
        assert met == expected
        assert pruned <= low
        assert bool(pruned) == bool(low)
        if epoch == 1:  # nobody has seen the pruned ones since; what is known of them would hide the new half
            sampler.observe(torch.tensor(sorted(pruned)), 100.0 - torch.tensor(sorted(pruned)))


def test_data_sets_of_any_shape_get_ids_and_weights() -> None:
    index = pickle.loads(pickle.dumps(Index(3, 2.5)))
    assert (index, index.weight, type(index)) == (3, 2.5, Index)
    assert copy.deepcopy(index).weight == 2.5
    assert WithWeights(Squares("tuple"))[index] == (9, -3, 3, 2.5)
    assert WithWeights(Squares("mapping"))[index] == {"x": 9, "ids": 3, "weights": 2.5}
    assert WithWeights(Squares("tensor"))[index] == (9, 3, 2.5)
    assert WithWeights(Squares("tensor"))[3] == (9, 3, 1.0)
    assert WithWeights(Subset(Squares("tensor"), [5, 6, 7, 8]))[index] == (64, 3, 2.5)
    assert len(WithWeights(Squares())) == N
    # Without it an index is a plain int, also for a loader and WithIds.
    (x, ids) = next(iter(DataLoader(WithIds(Squares("tensor")), sampler=[index, 4], batch_size=2)))
    assert (x.tolist(), ids.tolist()) == ([9, 16], [3, 4])
