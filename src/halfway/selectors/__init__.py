"""Selectors by name: they decide within the batch. A new one is a file beside this one and a line in `SELECTORS`.

Begin with `base`, which defines what a selector is. `tools` has what several of them share; `earlier` reads states and
settings of earlier versions.
"""

from __future__ import annotations

from ..errors import did_you_mean
from .auto import Auto
from .balanced import Balanced
from .balanced_proportional import BalancedProportional
from .balanced_remembered import BalancedRemembered
from .base import Candidates, OutputRanking, Ranking, Selection, Selector
from .class_balanced import ClassBalanced
from .density import Density
from .density_public import DensityPublic
from .divbs import DivBS
from .early_exit import EarlyExit
from .grad_norm import GradNorm
from .last_loss import LastLoss
from .last_loss_hard import LastLossHard
from .last_loss_proportional import LastLossProportional
from .loss import Loss
from .loss_rank import LossRank
from .order_dp import OrderDP
from .proxy import Proxy
from .random import Random
from .rho import Rho
from .rho_remembered import RhoRemembered
from .rotate import Rotate
from .selective_backprop import SelectiveBackprop
from .uncertainty import Uncertainty

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector
    for selector in (
        # Decided at the cut.
        Density,
        DensityPublic,
        Balanced,
        EarlyExit,
        # Decided before the model runs.
        Random,
        Auto,
        Rotate,
        ClassBalanced,
        LastLoss,
        LastLossHard,
        LastLossProportional,
        OrderDP,
        BalancedRemembered,
        BalancedProportional,
        RhoRemembered,
        # Decided by a small model of its own.
        Proxy,
        # Decided from the model's outputs.
        Loss,
        LossRank,
        SelectiveBackprop,
        GradNorm,
        DivBS,
        Rho,
        Uncertainty,
    )
}


def make(selector: str | Selector) -> Selector:
    """A selector from its name (with default settings), or the selector itself."""
    return selector if isinstance(selector, Selector) else kind(selector)()


def kind(selector: str | Selector) -> type[Selector]:
    """The class of a selector, which says what it needs; nothing is built."""
    if isinstance(selector, Selector):
        return type(selector)
    if isinstance(selector, type) and issubclass(selector, Selector):
        raise TypeError(f"selector is the class {selector.__name__}; pass a Selector made of it: {selector.__name__}()")
    if not isinstance(selector, str):
        raise TypeError(f"selector must be a name or a Selector, got {selector!r}; the names are {sorted(SELECTORS)}")
    if selector in SELECTORS:
        return SELECTORS[selector]
    raise ValueError(f"unknown selector {selector!r}; {did_you_mean(selector, SELECTORS)} (or pass a Selector)")


__all__ = [
    "SELECTORS",
    "Auto",
    "Balanced",
    "BalancedProportional",
    "BalancedRemembered",
    "Candidates",
    "ClassBalanced",
    "Density",
    "DensityPublic",
    "DivBS",
    "EarlyExit",
    "GradNorm",
    "LastLoss",
    "LastLossHard",
    "LastLossProportional",
    "Loss",
    "LossRank",
    "OrderDP",
    "OutputRanking",
    "Proxy",
    "Random",
    "Ranking",
    "Rho",
    "RhoRemembered",
    "Rotate",
    "Selection",
    "SelectiveBackprop",
    "Selector",
    "Uncertainty",
    "make",
]
