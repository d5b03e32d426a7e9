"""Unbiased thinning of near-twins by what is remembered of each sample: nothing is probed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import not_finite
from ..modules import find_layer
from ..state.flags import StickyFlag
from ..state.sample_memory import SampleMemory
from .balanced import distances_of
from .base import Candidates, Selection, Selector, retained_rows
from .tools.channels import find_input_channel_dim
from .tools.last_layer import last_linear
from .tools.last_losses import LastLosses
from .tools.pivotal import pivotal

# Seed of the projection, which must be the same on all ranks and after a restart.
_PROJECTION_SEED = 2012


class BalancedRemembered(Selector):
    """Spatially balanced sampling like `Balanced`, but on the features each sample had when it was last trained on.

    What: the input of the model's last linear layer, or of the layer `module`, is averaged over positions, projected at
        random to at most `dim` dimensions, and remembered for each retained sample. The choice is that of `Balanced`,
        on the remembered features. A sample without any counts as average.
    Source: Grafström, Lundström & Schelin, "Spatially Balanced Sampling through the Pivotal Method", Biometrics 2012.
        Its use for training, and on remembered features, is ours. On the map (results/README.md, a reduced scale) it
        was told apart from random pruning on no rung after correction.
    Cost: 1 - p, nothing is run on pruned samples: no probe, `at=None`. 4 `dim` bytes per sample of the data set. Then
        O(B^2 (D + log B)) for the choice, which is little for batches of up to some hundreds.
    Caveats: needs ids. The first epoch is random within classes. Targets that are not classes (masks) do not
        help it.

    Args:
        dim: the random projection has at most this many dimensions.
        module: name of the layer whose input is remembered; None: the model's last linear layer.
        use_loss: use the last known loss of each sample as one more coordinate, if `blocker.observe(losses)` reports
            losses.
        num_samples: size of the data set, see `SampleMemory`.
        channel_dim: axis of the layer's input that holds the channels; None works it out from the layer.
        target: which part of the batch holds the classes, see `Balanced`.
    """

    name = "balanced_remembered"
    wants_ids = "required"
    wants_targets = "optional"

    def __init__(
        self,
        dim: int = 64,
        module: str | None = None,
        use_loss: bool = True,
        num_samples: int | None = None,
        channel_dim: int | None = None,
        target: int | str | None = None,
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim = dim
        self.module = module
        self.channel_dim = channel_dim
        self.target = target
        self.wants_losses = "optional" if use_loss else "no"
        self._losses = self.remember("losses", LastLosses(num_samples)) if use_loss else None
        # Always `dim` wide, so that the state has a fixed shape; padded with zeros, which change no distance.
        self._features = self.remember("features", SampleMemory(dim, num_samples))
        self._width = 0  # of what enters the watched layer; 0: not known yet
        self._projection: Tensor | None = None
        self._layer_name = ""
        self._layer: nn.Module | None = None
        self._not_finite = StickyFlag()

    def watches(self, root: nn.Module) -> nn.Module | None:
        found = last_linear(root) if self.module is None else find_layer(root, self.module)[1]
        if found is None:
            raise ValueError(
                f"this {type(root).__name__} does not end in a linear layer; say which layer's input to remember: "
                f"{type(self).__name__}(module=...)"
            )
        self._layer_name, self._layer = find_layer(root, found)[0] if found is not root else "the model", found
        return found

    def select(self, candidates: Candidates, count: int) -> Selection:
        x_BD = self._features.read(candidates.required_ids, candidates.generator.device)
        d_BB = distances_of(candidates, x_BD, x_BD.isfinite().all(1), self._losses)
        return Selection(pivotal(d_BB, count, candidates.generator))

    def note(self, candidates: Candidates, retained: Tensor | None, watched: Tensor) -> None:
        ids = retained_rows(candidates.required_ids.to(watched.device, non_blocking=True), retained)
        x_SD = self._represent(watched, len(ids))
        # If one value of a sample is not finite, the whole sample counts as unknown.
        finite_S = x_SD.isfinite().all(1)
        self._not_finite.note(~finite_S.all())
        x_SD = torch.where(finite_S.unsqueeze(1), F.pad(x_SD, (0, self.dim - x_SD.shape[1])), float("nan"))
        self._features.write(ids, x_SD, candidates.ranks, candidates.size, among=candidates.required_ids)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        if self._losses is not None:
            self._losses.observe(candidates, retained, losses)

    def check(self) -> None:
        super().check()
        if self._not_finite.take():
            raise FloatingPointError(not_finite(self._layer_name))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "width": self._width}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        width = int(state.get("width", 0))
        if width < 0:
            raise ValueError(f"the state has features of width {width}")
        super().load_state_dict(state)
        self._width, self._projection = width, None

    def _represent(self, watched: Tensor, size: int) -> Tensor:
        """What entered the watched layer, averaged over positions and projected: (S, at most `dim`), float32."""
        if watched.ndim < 2 or len(watched) != size:
            raise ValueError(
                f"what enters {self._layer_name!r} has the shape {tuple(watched.shape)}, not a row for each of the "
                f"{size} samples; name a layer that sees them one by one: {type(self).__name__}(module=...)"
            )
        if watched.ndim > 2:
            axis = find_input_channel_dim(self._layer, watched.shape) if self.channel_dim is None else self.channel_dim
            watched = watched.movedim(axis, 1).flatten(2).mean(2, dtype=torch.float32)
        x_SD = watched.to(torch.float32)
        D = x_SD.shape[1]
        if self._width not in (0, D):
            raise ValueError(
                f"what enters {self._layer_name!r} now has {D} channels, and {self._width} when it was first seen; if "
                f"the channels are not where halfway looks, pass {type(self).__name__}(channel_dim=...)"
            )
        self._width = D
        if self.dim >= D:
            return x_SD
        if self._projection is None or self._projection.device != x_SD.device:
            self._projection = projection(D, self.dim).to(x_SD.device)
        return x_SD @ self._projection


def projection(width: int, dim: int) -> Tensor:
    """(width, dim) Gaussian, always the same. Distances change by a factor of about 1 +- 1 / sqrt(2 dim) (Johnson &
    Lindenstrauss 1984)."""
    generator = torch.Generator("cpu").manual_seed(_PROJECTION_SEED)
    return torch.randn(width, dim, generator=generator, device="cpu", dtype=torch.float32) / dim**0.5
