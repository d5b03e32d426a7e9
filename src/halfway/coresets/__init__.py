"""Coresets: a subset is chosen once, before training. A new method is a file in `scores` or `greedy` and a line here.

Begin with `base`, which defines what a method is; `evidence` is what it chooses from, `measure` gets that from a model,
`coreset` is what comes out.
"""

from __future__ import annotations

from typing import Any

from ..errors import did_you_mean
from . import measure
from .base import Greedy, Method, Picked, Scored
from .choosing import choose
from .coreset import Coreset
from .dynamics import Dynamics
from .evidence import Checkpoint, Evidence, ShortRun
from .greedy.ccs import CCS
from .greedy.craig import Craig
from .greedy.dataset_pruning import DatasetPruning
from .greedy.glister import Glister
from .greedy.herding import Herding
from .greedy.k_center import KCenter
from .scores.aum import AUM
from .scores.el2n import EL2N
from .scores.forgetting import Forgetting
from .scores.grand import GraNd, GraNdLast
from .scores.influence import Influence
from .scores.moderate import Moderate
from .scores.moso import MoSo
from .scores.random import RandomCoreset
from .scores.retention import RetentionRecord
from .scores.svp import SVP

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        RandomCoreset,
        # From the features and logits of a trained network.
        Herding,
        KCenter,
        SVP,
        Moderate,
        Craig,
        Glister,
        Influence,
        DatasetPruning,
        # From the course of a training.
        Forgetting,
        AUM,
        CCS,
        # From short trainings.
        EL2N,
        GraNd,
        GraNdLast,
        # From checkpoints.
        MoSo,
        # From a run that pruned.
        RetentionRecord,
    )
}


def make(name: str, **settings: Any) -> Method:
    """A method from its name; settings are those of its class."""
    if name not in METHODS:
        raise ValueError(f"unknown coreset method {name!r}; {did_you_mean(name, METHODS)}")
    return METHODS[name](**settings)


__all__ = [
    "AUM",
    "CCS",
    "EL2N",
    "METHODS",
    "SVP",
    "Checkpoint",
    "Coreset",
    "Craig",
    "DatasetPruning",
    "Dynamics",
    "Evidence",
    "Forgetting",
    "Glister",
    "GraNd",
    "GraNdLast",
    "Greedy",
    "Herding",
    "Influence",
    "KCenter",
    "Method",
    "MoSo",
    "Moderate",
    "Picked",
    "RandomCoreset",
    "RetentionRecord",
    "Scored",
    "ShortRun",
    "choose",
    "make",
    "measure",
]
