"""Unbiased thinning of near-twins: of samples that resemble each other one stays, drawn at random."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import not_finite
from ..modules import find_layer
from ..state.ranks import Ranks
from ..state.sample_memory import SampleMemory
from .base import Candidates, Selection, Selector, retained_rows
from .density import find_channel_dim
from .last_loss import LOSSES_NOT_FINITE
from .tools.last_layer import last_linear
from .tools.pivotal import distances, pivotal, standardised

FeatureSource = Literal["cut", "remembered"]

# Of the projection, which must be the same on all ranks and after a restart.
_PROJECTION_SEED = 2012


class Balanced(Selector):
    """Spatially balanced sampling: every sample stays with the same probability 1 - p, but near neighbours compete.

    What: the local pivotal method (`selectors/pivotal.py`). Two samples that are each other's nearest play for which of
        them stays, the loser's chance goes to the winner, and so on. Of two near-twins exactly one stays at p = 0.5,
        drawn at random, and any region of the features, any class, gives its share to within a sample or so. Distances
        are Euclidean between standardised features; with known classes only the same class competes, as long as it can.
        No importance, no bias: the mean loss of the retained samples estimates that of the batch, with less variance
        than random ones.
    Source: Grafström, Lundström & Schelin, "Spatially Balanced Sampling through the Pivotal Method", Biometrics 2012.
        Its use for training is ours; measured at toy scale only.
    Cost: "cut": the shallow layers of all samples, as `Density`. "remembered": nothing but 1 - p, and a memory of
        4 `dim` bytes per sample of the data set. Then O(B^2 (D + log B)) for the choice, which is little up to batches
        of some hundreds.
    Caveats: without targets, or with ones that are no classes (masks), it has not been better than random. A sample of
        which nothing is remembered counts as average, so the first epoch is random within classes. The last known loss
        is one coordinate among many.

    Args:
        features: "cut" (default): what leaves the cut layer, pooled to a `grid` x `grid` map. "remembered": what
            entered the layer `module` when the sample was last retained; needs ids and no probe (`at=None`).
        grid: side of the map that images are pooled to; tokens and sequences are averaged.
        dim: of "remembered": random projection to at most so many dimensions.
        module: of "remembered": name of the layer; None: the model's last linear layer.
        use_loss: take the last known loss of each sample as one more coordinate, if there are ids and
            `blocker.observe(losses)` reports losses.
        num_samples: size of the data set, see `SampleMemory`.
        channel_dim: axis of the features that holds the channels; None works it out from the layer.
        target: which part of the batch holds the classes, see `Selector`: integers (B,), or probabilities (B, C), of
            which the largest counts.
    """

    name = "balanced"
    wants_targets = "optional"

    def __init__(
        self,
        features: FeatureSource = "cut",
        grid: int = 2,
        dim: int = 64,
        module: str | None = None,
        use_loss: bool = True,
        num_samples: int | None = None,
        channel_dim: int | None = None,
        target: int | str | None = None,
    ) -> None:
        if features not in get_args(FeatureSource):
            raise ValueError(f"unknown features {features!r}; choose one of {get_args(FeatureSource)}")
        if grid < 1 or dim < 1:
            raise ValueError(f"grid and dim must be at least 1, got grid={grid}, dim={dim}")
        if module is not None and features == "cut":
            raise ValueError(
                f"module={module!r} names the layer of remembered features: Balanced('remembered', module={module!r}); "
                "where features come from the cut, the blocker's at= names it"
            )
        self.features = features
        self.grid = grid
        self.dim = dim
        self.module = module
        self.use_loss = use_loss
        self.num_samples = num_samples
        self.channel_dim = channel_dim
        self.target = target
        self.needs = "features" if features == "cut" else "nothing"
        self.wants_ids = "optional" if features == "cut" else "required"
        self.wants_losses = "optional" if use_loss else "no"
        self._losses = SampleMemory(1, num_samples) if use_loss else None
        # Always of width `dim`, padded with zeros, which no distance sees: the state has a fixed shape.
        self._remembered = SampleMemory(dim, num_samples) if features == "remembered" else None
        self._width = 0  # of what enters the watched layer; 0: not known yet
        self._projection: Tensor | None = None
        self._layer_name = ""
        self._layer: nn.Module | None = None
        self._channel_dims: dict[torch.Size, int] = {}
        self._bad_features: Tensor | None = None
        self._bad_losses: Tensor | None = None

    # ------------------------------------------------------------------ choosing

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        if self.features == "cut":
            self._layer_name, self._layer = layer_name, layer

    def watches(self, root: nn.Module) -> nn.Module | None:
        if self.features == "cut":
            return None
        found = last_linear(root) if self.module is None else find_layer(root, self.module)[1]
        if found is None:
            raise ValueError(
                f"this {type(root).__name__} does not end in a linear layer; say which layer's input to remember: "
                "Balanced('remembered', module=...)"
            )
        self._layer_name, self._layer = find_layer(root, found)[0] if found is not root else "the model", found
        return found

    def select(self, candidates: Candidates, count: int) -> Selection:
        device = candidates.generator.device
        x_BD, known_B = self._features(candidates, device)
        x_BD = standardised(x_BD, known_B)
        if self._losses is not None and candidates.ids is not None:
            losses_B1 = self._losses.read(candidates.ids, device)
            x_BD = torch.cat([x_BD, standardised(losses_B1, losses_B1.squeeze(1).isfinite())], 1)
        d_BB = distances(x_BD, classes_of(candidates.targets, candidates.size, device))
        if self.features == "cut":
            # Without waiting for the device: a step with a value that is not finite prunes at random.
            d_BB = torch.where(known_B.all(), d_BB, 0.0)
            self._bad_features = _either(self._bad_features, ~known_B.all())
        return Selection(pivotal(d_BB, count, candidates.generator))

    def _features(self, candidates: Candidates, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, D), and in which rows (B,) all of them are known."""
        if self._remembered is None:
            assert candidates.features is not None, "the blocker passes features to a selector that needs them"
            x_BD = grid_means(candidates.features, self._channels_of(candidates.features), self.grid)
        else:
            assert candidates.ids is not None, "the blocker passes ids to a selector that requires them"
            x_BD = self._remembered.read(candidates.ids, device)
        return x_BD, x_BD.isfinite().all(1)

    def _channels_of(self, features: Tensor) -> int:
        if self.channel_dim is not None:
            return self.channel_dim
        shape = features.shape[1:]
        if shape not in self._channel_dims:
            self._channel_dims[shape] = find_channel_dim(self._layer, features.shape)
        return self._channel_dims[shape]

    # ------------------------------------------------------------------ learning

    def note(self, candidates: Candidates, retained: Tensor | None, watched: Tensor) -> None:
        if self._remembered is None:
            return
        assert candidates.ids is not None, "the blocker passes ids to a selector that requires them"
        ids = retained_rows(candidates.ids.to(watched.device, non_blocking=True), retained)
        x_SD = self._represent(watched, len(ids))
        # A sample with a value that is not finite is unknown as a whole.
        finite_S = x_SD.isfinite().all(1)
        self._bad_features = _either(self._bad_features, ~finite_S.all())
        x_SD = torch.where(finite_S.unsqueeze(1), F.pad(x_SD, (0, self.dim - x_SD.shape[1])), float("nan"))
        self._remembered.write(ids, x_SD, candidates.ranks, candidates.size)

    def _represent(self, watched: Tensor, size: int) -> Tensor:
        """What entered the watched layer, averaged over positions and projected: (S, at most `dim`), float32."""
        if watched.ndim < 2 or len(watched) != size:
            raise ValueError(
                f"what enters {self._layer_name!r} has the shape {tuple(watched.shape)}, not a row for each of the "
                f"{size} samples; name a layer that sees them one by one: Balanced('remembered', module=...)"
            )
        if watched.ndim > 2:
            axis = find_input_channel_dim(self._layer, watched.shape) if self.channel_dim is None else self.channel_dim
            watched = watched.movedim(axis, 1).flatten(2).mean(2, dtype=torch.float32)
        x_SD = watched.to(torch.float32)
        D = x_SD.shape[1]
        if self._width not in (0, D):
            raise ValueError(
                f"what enters {self._layer_name!r} now has {D} channels, and {self._width} when it was first seen; if "
                "the channels are not where halfway looks, pass Balanced(channel_dim=...)"
            )
        self._width = D
        if self.dim >= D:
            return x_SD
        if self._projection is None or self._projection.device != x_SD.device:
            self._projection = projection(D, self.dim).to(x_SD.device)
        return x_SD @ self._projection

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        if self._losses is None or candidates.ids is None:
            return
        self._bad_losses = _either(self._bad_losses, ~losses.isfinite().all())
        ids = retained_rows(candidates.ids.to(losses.device, non_blocking=True), retained)
        self._losses.write(ids, losses, candidates.ranks, candidates.size)

    def learn_nothing(self, ranks: Ranks) -> None:
        # In the order in which the others write.
        if self._remembered is not None:
            self._remembered.write_nothing(ranks)
        if self._losses is not None:
            self._losses.write_nothing(ranks, optional=True)

    def check(self) -> None:
        for memory in (self._remembered, self._losses):
            if memory is not None:
                memory.check()
        features, self._bad_features = self._bad_features, None
        losses, self._bad_losses = self._bad_losses, None
        if features is not None and features:
            raise FloatingPointError(not_finite(self._layer_name))
        if losses is not None and losses:
            raise FloatingPointError(LOSSES_NOT_FINITE)

    # ---------------------------------------------------------------------- state

    def config(self) -> dict[str, Any]:
        return {
            "features": self.features,
            "grid": self.grid,
            "dim": self.dim,
            "module": self.module,
            "use_loss": self.use_loss,
            "num_samples": self.num_samples,
            "channel_dim": self.channel_dim,
            "target": self.target,
        }

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, always of the same shapes if `num_samples` is known."""
        state: dict[str, Any] = {}
        if self._losses is not None:
            state["losses"] = self._losses.values
        if self._remembered is not None:
            state.update(features=self._remembered.values, width=self._width)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"the state of this balanced selector has {sorted(mine)}, this one has {sorted(state)}")
        losses, remembered, width = self._losses, self._remembered, int(state.get("width", 0))
        if width < 0:
            raise ValueError(f"the state has features of width {width}")
        # Read as a whole before anything is taken over.
        if losses is not None:
            losses = SampleMemory(1, self.num_samples)
            losses.load_state_dict({"values": state["losses"]})
        if remembered is not None:
            remembered = SampleMemory(self.dim, self.num_samples)
            remembered.load_state_dict({"values": state["features"]})
        self._losses, self._remembered, self._width, self._projection = losses, remembered, width, None


def grid_means(features: Tensor, channel_dim: int, grid: int) -> Tensor:
    """(B, D) float32 or better: images (B, C, H, W) or (B, H, W, C), and volumes, as averages over a coarse grid, with
    at most `grid` cells along each axis; sequences and tokens as averages over all positions; vectors as they are."""
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


# What the modules that begin a layer say about the number of channels, and whether they expect them first or last.
_CHANNELS_FIRST = ("in_channels", "num_features", "num_channels")
_CHANNELS_LAST = ("in_features", "normalized_shape", "embed_dim")


def find_input_channel_dim(layer: nn.Module | None, shape: torch.Size) -> int:
    """The axis of what enters a layer that holds the channels, as its first submodule that knows their number says."""
    for module in layer.modules() if layer is not None else ():
        for names, axis in ((_CHANNELS_FIRST, 1), (_CHANNELS_LAST, -1)):
            channels = next((getattr(module, n) for n in names if hasattr(module, n)), None)
            if isinstance(channels, (tuple, list)):
                channels = channels[-1]
            if isinstance(channels, int) and shape[axis] == channels:
                return axis
    return find_channel_dim(None, shape)


def projection(width: int, dim: int) -> Tensor:
    """(width, dim) Gaussian, always the same: distances stay what they were, but for a factor of about
    1 +- 1 / sqrt(2 dim) (Johnson & Lindenstrauss 1984)."""
    generator = torch.Generator("cpu").manual_seed(_PROJECTION_SEED)
    return torch.randn(width, dim, generator=generator, device="cpu", dtype=torch.float32) / dim**0.5


def classes_of(targets: Any, size: int, device: torch.device) -> Tensor | None:
    """(B,) the class of each sample: integer labels (B,), or the largest of probabilities (B, C). None for other
    targets (masks, regression); all the same for numbers (B, C) that turn out on the device not to be probabilities."""
    if not isinstance(targets, Tensor) or targets.ndim not in (1, 2) or len(targets) != size:
        return None
    if targets.ndim == 1:
        whole = not targets.is_floating_point() and not targets.is_complex()
        return targets.to(device, non_blocking=True) if whole else None
    if not targets.is_floating_point() or targets.shape[1] < 2:
        return None
    shares_BC = targets.detach().to(device, torch.float32, non_blocking=True)
    probabilities = (shares_BC >= 0).all() & ((shares_BC.sum(1) - 1).abs() < 0.02).all()
    return torch.where(probabilities, shares_BC.argmax(1), 0)


def _either(flag: Tensor | None, more: Tensor) -> Tensor:
    return more if flag is None else flag | more
