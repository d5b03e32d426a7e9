"""Unbiased thinning of near-twins at the cut: of samples that resemble each other, one stays, drawn at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import not_finite
from ..state.flags import StickyFlag
from .base import Candidates, Selection, Selector
from .tools.channels import Channels
from .tools.class_shares import largest_class
from .tools.last_losses import LastLosses
from .tools.pivotal import distances, pivotal, standardised


class Balanced(Selector):
    """Spatially balanced sampling: every sample stays with the same probability 1 - p, but near neighbours compete.

    What: the local pivotal method (`selectors/tools/pivotal.py`). Two samples that are each other's nearest neighbour
        compete to stay, the loser's chance goes to the winner, and so on. At p = 0.5 exactly one of two near-twins
        stays, drawn at random, and any region of the features, any class, keeps its share to within a sample or so.
        Distances are Euclidean between standardised features of the cut, pooled to a `grid` x `grid` map. With known
        classes, samples compete within their class as long as they can. No importance, no bias: the mean loss of the
        retained samples estimates that of the batch, with less variance than that of random ones.
    Source: Grafström, Lundström & Schelin, "Spatially Balanced Sampling through the Pivotal Method", Biometrics 2012.
        Its use for training is ours; measured at a reduced scale only (results/rivals.md).
    Cost: the shallow layers of all samples, like `Density`. Then O(B^2 (D + log B)) for the choice, which is little for
        batches of up to some hundreds.
    Caveats: without targets, or with targets that are not classes (masks), it has not been better than random. The last
        known loss is one coordinate among many.

    Args:
        grid: side of the map that images are pooled to; tokens and sequences are averaged.
        use_loss: use the last known loss of each sample as one more coordinate, if there are ids and
            `blocker.observe(losses)` reports losses.
        num_samples: size of the data set, see `SampleMemory`.
        channel_dim: axis of the features that holds the channels; None works it out from the layer.
        target: which part of the batch holds the classes, see `Selector`: integers (B,), or probabilities (B, C), of
            which the largest counts.
    """

    name = "balanced"
    needs = "features"
    wants_ids = "optional"
    wants_targets = "optional"

    def __init__(
        self,
        grid: int = 2,
        use_loss: bool = True,
        num_samples: int | None = None,
        channel_dim: int | None = None,
        target: int | str | None = None,
    ) -> None:
        if grid < 1:
            raise ValueError(f"grid must be at least 1, got {grid}")
        self.grid = grid
        self.target = target
        self.wants_losses = "optional" if use_loss else "no"
        self._losses = self.remember("losses", LastLosses(num_samples)) if use_loss else None
        self._channels = Channels(channel_dim)
        self._not_finite = StickyFlag()

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        self._channels.bind(layer_name, layer)

    def select(self, candidates: Candidates, count: int) -> Selection:
        features = candidates.required_features
        x_BD = grid_means(features, self._channels.axis_of(features), self.grid)
        known_B = x_BD.isfinite().all(1)
        self._not_finite.note(~known_B.all())
        # A step with a value that is not finite prunes at random; finding out does not wait for the device.
        d_BB = torch.where(known_B.all(), distances_of(candidates, x_BD, known_B, self._losses), 0.0)
        return Selection(pivotal(d_BB, count, candidates.generator))

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        if self._losses is not None and candidates.ids is not None:
            self._losses.observe(candidates, retained, losses)

    def check(self) -> None:
        super().check()
        if self._not_finite.take():
            raise FloatingPointError(not_finite(self._channels.name))


def distances_of(candidates: Candidates, x_BD: Tensor, known_B: Tensor, losses: LastLosses | None) -> Tensor:
    """(B, B) distances between samples: of standardised features, with the last known loss as one more coordinate, and
    classes far apart.

    Args:
        x_BD: features.
        known_B: the rows in which they are known; the others count as average.
        losses: the last known losses, ignored without ids.
    """
    x_BD = standardised(x_BD, known_B)
    if losses is not None and candidates.ids is not None:
        losses_B = losses.of(candidates)
        x_BD = torch.cat([x_BD, standardised(losses_B.unsqueeze(1), losses_B.isfinite())], 1)
    found = largest_class(candidates.targets, candidates.size, candidates.generator.device)
    return distances(x_BD, None if found is None else found.classes_B)


def grid_means(features: Tensor, channel_dim: int, grid: int) -> Tensor:
    """(B, D) float32 or better: images (B, C, H, W) or (B, H, W, C) and volumes averaged over a coarse grid of at most
    `grid` cells along each axis; sequences and tokens averaged over all positions; vectors as they are."""
    if features.ndim < 2:
        raise ValueError(f"features need a batch axis and a channel axis, got shape {tuple(features.shape)}")
    x = features.to(torch.promote_types(features.dtype, torch.float32)).movedim(channel_dim, 1)
    cells = [min(grid, n) for n in x.shape[2:]]
    if x.ndim == 4:
        x = F.adaptive_avg_pool2d(x, (cells[0], cells[1]))
    elif x.ndim == 5:
        x = F.adaptive_avg_pool3d(x, (cells[0], cells[1], cells[2]))
    elif x.ndim > 2:
        x = x.mean(list(range(2, x.ndim)))
    return x.flatten(1)
