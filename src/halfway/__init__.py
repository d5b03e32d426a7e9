"""halfway: Partial Forward Blocking for PyTorch. Samples leave the batch halfway through the forward pass."""

from . import functional, samplers, selectors
from .batch import WithIds
from .blocker import ForwardBlocker
from .cost import cost
from .cuts import layers
from .density import DensityEstimator
from .engine import ReplayError
from .schedule import Schedule
from .selectors import Density, Random, Selection, Selector
from .stats import Stats

__version__ = "0.1.0"

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
