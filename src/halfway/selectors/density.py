"""PFB itself: prune the samples whose representation at the cut is the most common."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional as PF
from ..errors import not_finite
from ..functional import BandwidthRule, UpdateRule
from ..state.estimator import DensityEstimator
from ..state.ranks import Ranks
from .base import Candidates, Selection, Selector


class Density(Selector):
    """Partial Forward Blocking: prune the samples that are the most common at the cut.

    What: importance 1 / (f + alpha max f) (Eq. 2 and 3), with f the density of a sample's pooled features under a
        mixture of Gaussian kernels that follows the retained samples (Eq. 4-9), and alpha uniform in (0, b).
    Source: Wu et al., "Partial Forward Blocking: A Novel Data Pruning Paradigm for Lossless Training Acceleration",
        ICCV 2025; where we deviate, and why: docs/method.md.
    Cost: the shallow forward of all samples, (1 - p) + p F/T.
    Caveats: drops the same typical samples in every epoch. In our comparisons so far, all of them small, random pruning
        did better for less.

    Args:
        num_centroids: N_C, kernels in the mixture.
        dim: D, representations are pooled to at most this many dimensions.
        noise: b, upper bound of the random term (Eq. 3). The paper takes 0.01 on CIFAR and 0.001 on ImageNet.
        bandwidth, update_rule, kernel_weights, beta: see `DensityEstimator`.
        channel_dim: axis of the cut's output that holds the channels; None works it out from the layer.
    """

    name = "density"
    needs = "features"

    def __init__(
        self,
        num_centroids: int = 64,
        dim: int = 128,
        noise: float = 0.01,
        bandwidth: BandwidthRule = "silverman",
        update_rule: UpdateRule = "convex",
        kernel_weights: bool = True,
        beta: float = 0.01,
        channel_dim: int | None = None,
    ) -> None:
        if noise < 0:
            raise ValueError(f"noise must not be negative, got {noise}")
        self._estimator_settings: dict[str, Any] = {
            "num_centroids": num_centroids,
            "bandwidth": bandwidth,
            "update_rule": update_rule,
            "kernel_weights": kernel_weights,
            "beta": beta,
        }
        self.dim = dim
        self.noise = noise
        self.channel_dim = channel_dim
        # Its width is known when the first features arrive: min(dim, channels). Built here for its checks alone.
        DensityEstimator(dim=dim, **self._estimator_settings)
        self.estimator: DensityEstimator | None = None
        self._layer_name = ""
        self._layer: nn.Module | None = None
        self._channel_dims: dict[torch.Size, int] = {}
        self._represented: tuple[Candidates, Tensor] | None = None

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        self._layer_name, self._layer = layer_name, layer

    def select(self, candidates: Candidates, count: int) -> Selection:
        x_BD = self._represent(candidates)
        estimator = self._estimator_for(x_BD)
        estimator.settle()
        chance_B = torch.rand(candidates.size, generator=candidates.generator, device=x_BD.device, dtype=x_BD.dtype)
        if not estimator.ready:
            return Selection(PF.retain(chance_B, count), chance_B)
        importance_B = self.importance(estimator, x_BD, candidates.generator)
        # Without waiting for the device: a step with a value that is not finite prunes at random.
        importance_B = torch.where(x_BD.isfinite().all(), importance_B, chance_B)
        return Selection(PF.retain(importance_B, count), importance_B)

    def importance(self, estimator: DensityEstimator, x_BD: Tensor, generator: torch.Generator) -> Tensor:
        """(B,), larger is more important, once all centroids are filled."""
        return PF.importance(estimator.log_density(x_BD), self.noise, generator)

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        x_BD = self._represent(candidates)
        # One row is poisoned together with all others, so that no rank and no step learns from half a batch.
        x_BD = torch.where(x_BD.isfinite().all(), x_BD, float("nan"))
        x_SD = x_BD if retained is None else x_BD.index_select(0, retained)
        self._estimator_for(x_BD).update(x_SD, candidates.ranks)
        self._represented = None

    def learn_nothing(self, ranks: Ranks) -> None:
        if self.estimator is None:
            raise RuntimeError(
                "this rank has no batch at all, so it cannot take part in what the others learn; give every rank at "
                "least one batch"
            )
        self.estimator.update(self.estimator.centroids[:0], ranks)

    def check(self) -> None:
        if self.estimator is None:
            return
        self.estimator.settle()
        if self.estimator.refused:
            self.estimator.refused.zero_()
            raise FloatingPointError(not_finite(self._layer_name))

    def config(self) -> dict[str, Any]:
        return {
            **self._estimator_settings,
            "dim": self.dim,
            "noise": self.noise,
            "channel_dim": self.channel_dim,
        }

    def state_dict(self) -> dict[str, Any]:
        """The estimator's, of the same shape before and after it is made: checkpoints are often loaded in place."""
        C = self._estimator_settings["num_centroids"]
        state: dict[str, Any] = {
            "centroids": torch.zeros(C, self.dim, device="cpu"),
            "counts": torch.zeros(C, dtype=torch.int64, device="cpu"),
            "width": 0,
        }
        if self.estimator is not None:
            found = self.estimator.state_dict()
            D = self.estimator.dim
            state = {"centroids": F.pad(found["centroids"], (0, self.dim - D)), "counts": found["counts"], "width": D}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"centroids", "counts", "width"}:
            raise ValueError(
                f"the state of a density selector has centroids, counts and width, this one has {sorted(state)}"
            )
        shape, D = (self._estimator_settings["num_centroids"], self.dim), int(state["width"])
        if tuple(state["centroids"].shape) != shape or not 0 <= D <= self.dim:
            raise ValueError(
                f"the state has centroids of shape {tuple(state['centroids'].shape)} and width {D}, but this selector "
                f"is made for {shape}"
            )
        if D == 0:
            self.estimator = None
            return
        estimator = DensityEstimator(dim=D, **self._estimator_settings).to(state["centroids"].device)
        estimator.load_state_dict({"centroids": state["centroids"][:, :D], "counts": state["counts"]})
        self.estimator = estimator

    def _represent(self, candidates: Candidates) -> Tensor:
        """(B, D), computed once for choosing and learning."""
        if self._represented is not None and self._represented[0] is candidates:
            x_BD = self._represented[1]
            self._represented = None
            return x_BD
        features = candidates.features
        assert features is not None, "the blocker passes features to a selector that needs them"
        axis = self.channel_dim
        if axis is None:
            shape = features.shape[1:]
            if shape not in self._channel_dims:
                self._channel_dims[shape] = find_channel_dim(self._layer, features.shape)
            axis = self._channel_dims[shape]
        x_BD = PF.represent(features, self.dim, axis)
        self._represented = (candidates, x_BD)
        return x_BD

    def _estimator_for(self, x_BD: Tensor) -> DensityEstimator:
        if self.estimator is None:
            self.estimator = DensityEstimator(dim=x_BD.shape[1], **self._estimator_settings)
        if self.estimator.dim != x_BD.shape[1]:
            raise ValueError(
                f"the features of {self._layer_name!r} now have {x_BD.shape[1]} channels, the estimator was made for "
                f"{self.estimator.dim}; if the channels are not where halfway looks, pass Density(channel_dim=...)"
            )
        if self.estimator.centroids.device != x_BD.device:
            self.estimator.to(x_BD.device)
        return self.estimator


# What the modules that end a layer say about the number of channels, and whether they put them first or last.
_CHANNELS_FIRST = ("out_channels", "num_features", "num_channels")
_CHANNELS_LAST = ("out_features", "normalized_shape", "embedding_dim")


def find_channel_dim(layer: nn.Module | None, shape: torch.Size) -> int:
    """The axis of a layer's output that holds the channels: NCHW (1), NHWC and tokens (-1), vectors (1).

    The layer's last submodule that knows its number of channels decides; a square map where none does.
    """
    if len(shape) == 2:
        return 1
    for module in reversed(list(layer.modules()) if layer is not None else []):
        for names, usual, other in ((_CHANNELS_FIRST, 1, -1), (_CHANNELS_LAST, -1, 1)):
            channels = next((getattr(module, n) for n in names if hasattr(module, n)), None)
            if isinstance(channels, (tuple, list)):
                channels = channels[-1]
            if isinstance(channels, int):
                for axis in (usual, other):
                    if shape[axis] == channels:
                        return axis
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        return -1
    return -1 if len(shape) == 3 else 1
