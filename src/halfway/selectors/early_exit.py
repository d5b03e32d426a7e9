"""Retain what a linear head at the cut does not know yet.

Shape suffixes: B batch, D inputs of the head, C classes.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..errors import not_finite
from ..state.flags import StickyFlag
from ..state.online_head import OnlineHead
from .balanced import grid_means
from .balanced_remembered import projection
from .base import Candidates, Selection, Selector
from .tools.channels import Channels
from .tools.class_shares import class_shares
from .tools.draw import inclusion_probabilities, systematic, without_ties
from .tools.last_layer import last_linear, width_of
from .tools.proportional import weights

Pick = Literal["proportional", "hard"]


class EarlyExit(Selector):
    """An early exit at the cut, trained on the way, says which samples are hard.

    What: the features at the cut, averaged over a `grid` x `grid` map and projected at random to at most `dim` numbers,
        enter a linear head. Score: KL(target || prediction), with what earlier batches taught; for a class y that is
        -log p_y, and a mixed label is not preferred for its own entropy. Samples are drawn with probability
        min(1, c w), w = k g + (1 - k) mean g, g = 1 - exp(-score), which for a class is 1 - p_y. k is the head's skill:
        the part of log C by which its recent predictions beat equal chances, so that a head that knows nothing draws at
        random (`stats.diagnostics["skill_of_head"]`). Or the S largest scores stay. Then the head learns from *all*
        samples, the pruned ones and those of epochs without pruning included: one step of SGD (momentum 0.9, from zero)
        on inputs standardised by their running mean and variance.
    Source: early exits are those of Teerapittayanon, McDanel & Kung, "BranchyNet", ICPR 2016. Their use for pruning is
        ours. In our comparisons (results/README.md, a reduced scale) it was nowhere better than random pruning.
    Cost: the shallow forward of all samples, like `Density`, and 6 D C FLOPs for each. Over ranks one sum of
        (C + 2)(`dim` + 1) numbers per step.
    Caveats: needs neither ids nor a memory of samples, so it can also be used where each sample is seen once. While the
        head is no better than chance, the proportional draw is random; pick="hard" never is. Both prefer outliers and
        wrong labels. Of a compiled model the head sees the pruned steps only.

    Args:
        pick: "proportional" (default), or "hard": the largest scores, ties broken at random.
        num_classes: C; None: the number of outputs of the model's last linear layer.
        grid: side of the map that images are averaged over; tokens and sequences are averaged over all positions.
        dim: D, the most inputs of the head.
        lr: learning rate of the head. The smaller the batch, the more of a step is noise, which can make the head worse
            than chance, and the draw random: lower it for small batches.
        channel_dim: axis of the features that holds the channels; None works it out from the layer.
        target: which part of the batch holds the targets, see `Selector`: classes (B,), where negative ones are no
            label; probabilities (B, C); or masks (B, H, W), of which the shares of the labelled pixels count (255 and
            negative ones are not). A sample without any label teaches nothing and scores 0; its w is the mean.
    """

    name = "early_exit"
    needs = "features"
    wants_targets = "required"

    def __init__(
        self,
        pick: Pick = "proportional",
        num_classes: int | None = None,
        grid: int = 2,
        dim: int = 256,
        lr: float = 0.05,
        channel_dim: int | None = None,
        target: int | str | None = None,
    ) -> None:
        if pick not in get_args(Pick):
            raise ValueError(f"unknown pick {pick!r}; choose one of {get_args(Pick)}")
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        if grid < 1 or dim < 1:
            raise ValueError(f"grid and dim must be at least 1, got grid={grid}, dim={dim}")
        if not 0 < lr < float("inf"):
            raise ValueError(f"lr, the learning rate of the head, must be positive, got {lr}")
        self.pick = pick
        self.num_classes = num_classes
        self.grid = grid
        self.dim = dim
        self.lr = lr
        self.target = target
        self._head = OnlineHead(dim, num_classes or 0, lr)  # without classes until the model is known
        self._channels = Channels(channel_dim)
        self._width = 0  # of the pooled features; 0: not known yet
        self._projection: Tensor | None = None
        self._read: tuple[Candidates, Tensor, Tensor, Tensor] | None = None
        self._wrong_targets = StickyFlag()
        self._looked = False

    def watches(self, root: nn.Module) -> nn.Module | None:
        """No module's input is needed, but here the model is known: its last linear layer counts the classes."""
        if self.num_classes is not None:
            return None
        last = last_linear(root)
        classes = 0 if last is None else width_of(last)
        if classes < 2:
            found = "does not end in a linear layer" if last is None else "ends in a linear layer with a single output"
            raise ValueError(
                f"this {type(root).__name__} {found}, so the selector {self.name!r} does not know how many classes "
                "there are; pass EarlyExit(num_classes=...). For targets that are not classes choose "
                f"{_ALTERNATIVES}"
            )
        if self._head.classes != classes:
            self._head = OnlineHead(self.dim, classes, self.lr)
        return None

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        self._channels.bind(layer_name, layer)

    def select(self, candidates: Candidates, count: int) -> Selection:
        x_BD, targets_BC, labelled_B = self._reading(candidates)
        score_B = divergences(targets_BC, self._head.log_probabilities(x_BD))
        # Equal scores are drawn at random, and so is a step with a value that is not finite. Nothing waits to find out.
        score_B = torch.where(functional.all_finite(score_B), score_B, 0.0)
        if self.pick == "hard":
            return Selection(functional.retain(without_ties(score_B, candidates.generator), count), score_B)
        g_B = weights(score_B, labelled_B, scale="bounded", floor=0.0)
        w_B = torch.lerp(g_B.mean(), g_B, self._head.skill.to(g_B))
        return Selection(systematic(inclusion_probabilities(w_B, count), count, candidates.generator), score_B)

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        x_BD, targets_BC, labelled_B = self._reading(candidates)
        self._read = None
        self._head.learn(x_BD, targets_BC, labelled_B, candidates.ranks)

    def diagnostics(self) -> dict[str, float]:
        return {"skill_of_head": float(self._head.skill)} if self._head.classes else {}

    def check(self) -> None:
        super().check()
        self._head.settle()
        if self._wrong_targets.take():
            raise ValueError(self._wrong_values())
        if self._head.refused.take():
            raise FloatingPointError(not_finite(self._channels.name))

    def state_dict(self) -> dict[str, Any]:
        """The head's tensors and the width of the pooled features. Shapes depend on `dim` and the classes alone."""
        return {**self._head.state_dict(), "width": self._width}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = sorted(self.state_dict())
        if sorted(state) != mine:
            raise ValueError(f"the state of the selector {self.name!r} has {mine}, this one has {sorted(state)}")
        width = int(state["width"])
        if width < 0:
            raise ValueError(f"the state has features of width {width}")
        self._head.load_state_dict(state)
        self._width, self._projection, self._read = width, None, None

    def _reading(self, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of the head (B, D), targets (B, C) and which rows have one (B,), read once per step."""
        if self._read is None or self._read[0] is not candidates:
            if not self._head.classes:
                raise ValueError(f"the selector {self.name!r} does not know the classes; pass num_classes")
            x_BD = self._represent(candidates.required_features)
            shares = class_shares(candidates.targets, candidates.size, self._head.classes, x_BD.device)
            if shares is None:
                raise ValueError(
                    f"the selector {self.name!r} needs classes (B,), probabilities (B, {self._head.classes}) or masks "
                    f"(B, H, W) as targets, got {_described(candidates.targets)}; say where they are "
                    f"(EarlyExit(target=...)), how many (num_classes=...), or choose {_ALTERNATIVES}"
                )
            # Asked at once in the first batch only, where waiting for the device costs little; then by `check`.
            if not self._looked and bool(shares.wrong):
                raise ValueError(self._wrong_values())
            self._looked = True
            self._wrong_targets.note(shares.wrong)
            self._read = (candidates, x_BD, shares.shares_BC, shares.labelled_B)
        return self._read[1:]

    def _represent(self, features: Tensor) -> Tensor:
        """(B, `dim`) float32: pooled, projected if there are more, padded with zeros if there are fewer."""
        x_BD = grid_means(features, self._channels.axis_of(features), self.grid).to(torch.float32)
        D = x_BD.shape[1]
        if self._width not in (0, D):
            raise ValueError(
                f"the features of {self._channels.name!r} now have {D} values after pooling, and {self._width} when "
                "they were first seen; if the channels are not where halfway looks, pass EarlyExit(channel_dim=...)"
            )
        self._width = D
        if self.dim >= D:
            return F.pad(x_BD, (0, self.dim - D))
        if self._projection is None or self._projection.device != x_BD.device:
            self._projection = projection(D, self.dim).to(x_BD.device)
        return x_BD @ self._projection

    def _wrong_values(self) -> str:
        return (
            f"the selector {self.name!r} found targets that are neither classes from 0 to {self._head.classes - 1} "
            f"nor probabilities; pass EarlyExit(num_classes=...), or choose {_ALTERNATIVES}"
        )


_ALTERNATIVES = "another selector: random, last_loss_proportional or density"


def divergences(targets_BC: Tensor, log_p_BC: Tensor) -> Tensor:
    """(B,) KL(target || prediction); for a single class minus its log probability, for a row of zeros 0."""
    return (torch.xlogy(targets_BC, targets_BC) - targets_BC * log_p_BC).sum(1).clamp_min(0)


def _described(targets: Any) -> str:
    if not isinstance(targets, Tensor):
        return f"a {type(targets).__name__}"
    return f"{str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"
