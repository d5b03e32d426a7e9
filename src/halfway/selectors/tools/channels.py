"""Where a layer's input or output has its channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Channels:
    """The channel axis of one layer's output, looked for once per shape.

    Args:
        axis: the axis; None: worked out from the layer.

    Attributes:
        name, layer: the layer the features come from, once it is bound.
    """

    def __init__(self, axis: int | None) -> None:
        self._axis = axis
        self.name = ""
        self.layer: nn.Module | None = None
        self._found: dict[torch.Size, int] = {}

    def bind(self, name: str, layer: nn.Module) -> None:
        """Set the layer that the features come from."""
        self.name, self.layer = name, layer

    def axis_of(self, features: Tensor) -> int:
        """The channel axis of these features."""
        if self._axis is not None:
            return self._axis
        shape = features.shape[1:]
        if shape not in self._found:
            self._found[shape] = find_channel_dim(self.layer, features.shape)
        return self._found[shape]


# The attribute of modules at a layer's end that holds the number of channels, and whether channels are first or last.
_OUT_FIRST = ("out_channels", "num_features", "num_channels")
_OUT_LAST = ("out_features", "normalized_shape", "embedding_dim")


def find_channel_dim(layer: nn.Module | None, shape: torch.Size) -> int:
    """The axis of a layer's output that holds the channels: NCHW (1), NHWC and tokens (-1), vectors (1).

    The layer's last submodule that knows its number of channels decides; without one, the square map in the shape does.
    """
    if len(shape) == 2:
        return 1
    for module in reversed(list(layer.modules()) if layer is not None else []):
        for names, usual, other in ((_OUT_FIRST, 1, -1), (_OUT_LAST, -1, 1)):
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


# The attribute of modules at a layer's start that holds the number of channels, and whether channels are first or last.
_IN_FIRST = ("in_channels", "num_features", "num_channels")
_IN_LAST = ("in_features", "normalized_shape", "embed_dim")


def find_input_channel_dim(layer: nn.Module | None, shape: torch.Size) -> int:
    """The channel axis of a layer's input; the first submodule that knows its number of channels decides."""
    for module in layer.modules() if layer is not None else ():
        for names, axis in ((_IN_FIRST, 1), (_IN_LAST, -1)):
            channels = next((getattr(module, n) for n in names if hasattr(module, n)), None)
            if isinstance(channels, (tuple, list)):
                channels = channels[-1]
            if isinstance(channels, int) and shape[axis] == channels:
                return axis
    return find_channel_dim(None, shape)
