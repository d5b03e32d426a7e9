"""PFB itself: prune the samples whose representation at the cut is the most common."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..errors import not_finite
from ..functional import BandwidthRule, NoiseScale, UpdateRule
from ..state.estimator import DensityEstimator
from .base import Candidates, Selection, Selector
from .tools.channels import Channels


class Density(Selector):
    """Partial Forward Blocking: prune the samples that are the most common at the cut.

    What: importance 1 / (f + alpha max f) (Eq. 2 and 3), with f the density of a sample's pooled features under a
        mixture of Gaussian kernels that follows the retained samples (Eq. 4-9), and alpha uniform in (0, b).
    Source: Wu et al., "Partial Forward Blocking: A Novel Data Pruning Paradigm for Lossless Training Acceleration",
        ICCV 2025; where we deviate, and why: docs/method.md.
    Cost: the shallow forward of all samples, (1 - p) + p F/T.
    Caveats: drops the same typical samples in every epoch. In our comparisons so far, all of them small, random pruning
        did better at a lower cost. The more dimensions, the wider the log densities of a batch spread, and the more
        samples are ranked by the noise alone: at D = 128 and b = 0.001 the density made 0.32 of the choice of an
        untrained ResNet-18 on CIFAR-10 (1: all of it, 0: no more than chance; docs/method.md has the command). At
        D = 16, as in our tiny recipes, the noise hardly matters, so they measure a different method.
        `stats.diagnostics["chosen_by_density"]` has this share; `noise_scale="spread"` makes it independent of D.

    Args:
        num_centroids: N_C, kernels in the mixture.
        dim: D, representations are pooled to at most this many dimensions.
        noise: b. With noise_scale="paper" the upper bound of alpha (Eq. 3); the paper takes 0.01 on CIFAR and 0.001 on
            ImageNet. With "spread" the standard deviation of the noise, relative to that of the log densities.
        noise_scale: "paper" (default) or "spread", see `functional.importance`.
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
        noise_scale: NoiseScale = "paper",
    ) -> None:
        if noise < 0:
            raise ValueError(f"noise must not be negative, got {noise}")
        if noise_scale not in get_args(NoiseScale):
            raise ValueError(f"unknown noise_scale {noise_scale!r}; choose one of {get_args(NoiseScale)}")
        self._estimator_settings: dict[str, Any] = {
            "num_centroids": num_centroids,
            "bandwidth": bandwidth,
            "update_rule": update_rule,
            "kernel_weights": kernel_weights,
            "beta": beta,
        }
        self.dim = dim
        self.noise = noise
        self.noise_scale: NoiseScale = noise_scale
        # Built here only to check the settings: its width, min(dim, channels), is known with the first features.
        DensityEstimator(dim=dim, **self._estimator_settings)
        self.estimator: DensityEstimator | None = None
        self.channel_dim = channel_dim
        self._channels = Channels(channel_dim)
        # What a step looks at, computed once for choosing and learning.
        self._represented: tuple[Candidates, Tensor, Tensor] | None = None
        # The share of the choice that the density made: in this step, and summed over steps.
        self._share: Tensor | None = None
        self._by_density: Tensor | None = None
        self._choices = 0

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        self._channels.bind(layer_name, layer)

    def select(self, candidates: Candidates, count: int) -> Selection:
        x_BD, finite = self._represent(candidates)
        estimator = self._estimator_for(x_BD)
        estimator.settle()
        chance_B = torch.rand(candidates.size, generator=candidates.generator, device=x_BD.device, dtype=x_BD.dtype)
        if not estimator.ready:
            return Selection(functional.retain(chance_B, count), chance_B)
        score_B = self.score(estimator, x_BD)
        importance_B = self.with_noise(score_B, candidates.generator)
        # A step with a value that is not finite prunes at random; finding out does not wait for the device.
        importance_B = torch.where(finite, importance_B, chance_B)
        retained_S = functional.retain(importance_B, count)
        self._share = torch.where(finite, _in_common(retained_S, score_B), 0.0)
        return Selection(retained_S, importance_B)

    def score(self, estimator: DensityEstimator, x_BD: Tensor) -> Tensor:
        """(B,) importance of each sample by density alone, once all centroids are filled."""
        return -estimator.log_density(x_BD)

    def with_noise(self, score_B: Tensor, generator: torch.Generator) -> Tensor:
        """(B,) importance: the scores with noise."""
        return functional.importance(-score_B, self.noise, generator, self.noise_scale)

    def diagnostics(self) -> dict[str, float]:
        """chosen_by_density: how much of the choice was made by the density rather than the noise. It is the share of
        the retained samples that would also be retained without noise, scaled so that chance gives 0 and full agreement
        1; the mean over this selector's steps that had a density, absent before the first."""
        if self._by_density is None:
            return {}
        return {"chosen_by_density": float(self._by_density) / self._choices}

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        share, self._share = self._share, None
        if share is not None and retained is not None:  # here, so that a step that raised does not count
            self._by_density = share if self._by_density is None else self._by_density.to(share) + share
            self._choices += 1
        x_BD, finite = self._represent(candidates)
        # A bad row spoils the whole batch on all ranks, so that no rank and no step learns from half a batch.
        x_BD = torch.where(finite, x_BD, float("nan"))
        x_SD = x_BD if retained is None else x_BD.index_select(0, retained)
        self._estimator_for(x_BD).update(x_SD, candidates.ranks)
        self._represented = None

    def check(self) -> None:
        if self.estimator is None:
            return
        self.estimator.settle()
        if self.estimator.refused.take():
            raise FloatingPointError(not_finite(self._channels.name))

    def state_dict(self) -> dict[str, Any]:
        """The estimator's state. It has the same shape before the estimator exists, because checkpoints are often
        loaded in place."""
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
        self._share, self._by_density, self._choices = None, None, 0
        if D == 0:
            self.estimator = None
            return
        estimator = DensityEstimator(dim=D, **self._estimator_settings).to(state["centroids"].device)
        estimator.load_state_dict({"centroids": state["centroids"][:, :D], "counts": state["counts"]})
        self.estimator = estimator

    def _represent(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """(B, D), and () whether all of it is finite; computed once for choosing and learning."""
        if self._represented is not None and self._represented[0] is candidates:
            _, x_BD, finite = self._represented
            self._represented = None
            return x_BD, finite
        features = candidates.required_features
        x_BD = functional.represent(features, self.dim, self._channels.axis_of(features))
        finite = functional.all_finite(x_BD)
        self._represented = (candidates, x_BD, finite)
        return x_BD, finite

    def _estimator_for(self, x_BD: Tensor) -> DensityEstimator:
        if self.estimator is None:
            self.estimator = DensityEstimator(dim=x_BD.shape[1], **self._estimator_settings)
        if self.estimator.dim != x_BD.shape[1]:
            raise ValueError(
                f"the features of {self._channels.name!r} now have {x_BD.shape[1]} channels, the estimator was made "
                f"for {self.estimator.dim}; if the channels are not where halfway looks, pass Density(channel_dim=...)"
            )
        if self.estimator.centroids.device != x_BD.device:
            self.estimator.to(x_BD.device)
        return self.estimator


def _in_common(retained_S: Tensor, score_B: Tensor) -> Tensor:
    """() how much of a choice the scores alone would have made: 1 for all of it, 0 for no more than chance."""
    B, S = len(score_B), len(retained_S)
    if S == B:
        return score_B.new_ones(())
    alone_B = score_B.new_zeros(B).index_fill(0, score_B.topk(S, sorted=False).indices, 1.0)
    # Two random choices have S/B of their samples in common.
    return (alone_B.index_select(0, retained_S).mean() - S / B) / (1 - S / B)
