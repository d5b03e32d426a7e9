"""halfway: Partial Forward Blocking for PyTorch. Samples leave the batch halfway through the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import coresets, functional, samplers, selectors
from .batches.batch import WithIds
from .blocker.blocker import ForwardBlocker
from .blocker.compilation import compile
from .costs.cost import cost
from .costs.layers import layers
from .errors import ReplayError
from .loading.pruned_batches import PrunedBatchSampler
from .ratios import ramp, steps
from .schedule import Schedule
from .selectors import Density, Random, Selection, Selector
from .state.estimator import DensityEstimator
from .stats import Stats

if TYPE_CHECKING:
    from .advice import advise

__version__ = "0.1.0"

__all__ = [
    "Density",
    "DensityEstimator",
    "ForwardBlocker",
    "PrunedBatchSampler",
    "Random",
    "ReplayError",
    "Schedule",
    "Selection",
    "Selector",
    "Stats",
    "WithIds",
    "advise",
    "compile",
    "coresets",
    "cost",
    "functional",
    "layers",
    "ramp",
    "samplers",
    "selectors",
    "steps",
]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: no training needs it.
    if name == "advise":
        from .advice import advise

        return advise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
