"""halfway: Partial Forward Blocking for PyTorch. Samples leave the batch halfway through the forward pass."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import functional, selectors
from .batches.batch import WithIds
from .blocker.blocker import ForwardBlocker
from .costs.cost import cost
from .costs.layers import layers
from .engine.engine import ReplayError
from .schedule import Schedule
from .selectors import Density, Random, Selection, Selector
from .state.estimator import DensityEstimator
from .stats import Stats

if TYPE_CHECKING:
    from . import samplers

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`halfway.samplers` is imported when it is first used: most trainings need none."""
    if name == "samplers":
        return importlib.import_module(".samplers", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Density",
    "DensityEstimator",
    "ForwardBlocker",
    "Random",
    "ReplayError",
    "Schedule",
    "Selection",
    "Selector",
    "Stats",
    "WithIds",
    "cost",
    "functional",
    "layers",
    "samplers",
    "selectors",
]
