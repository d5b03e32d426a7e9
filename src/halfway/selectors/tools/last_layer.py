"""The model's last linear layer: its input is the penultimate representation, and its gradient is free.

For y = W h the gradient of a sample's loss with respect to W is the outer product of the gradient with respect to y
and h, so outputs and h are enough, without a backward pass.
"""

from __future__ import annotations

from torch import Tensor, nn


def last_linear(root: nn.Module) -> nn.Module | None:
    """The last linear layer or convolution in the order of registration, if it is linear at each position (`nn.Linear`,
    or a convolution with a kernel of 1 and one group); None if it is something else, or if there is none.

    Auxiliary heads (a name that begins with "aux", in any case) do not count. Registration is not execution: for a
    model that registers its classifier before other layers, override the selector's `watches`.
    """
    last = None
    for name, module in root.named_modules():
        auxiliary = any(part.lower().startswith("aux") for part in name.split("."))
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not auxiliary:
            last = module
    if isinstance(last, nn.Linear):
        return last
    if last is not None and all(k == 1 for k in last.kernel_size) and last.groups == 1:
        return last
    return None


def width_of(layer: nn.Module) -> int:
    """The number of outputs, at each position, of a layer found by `last_linear`."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def channels_first(watched: Tensor, layer: nn.Module | None) -> Tensor:
    """The input of the layer as (B, D, positions ...): a linear layer has its D features last, a convolution first.

    Without a layer, three dimensions are taken as tokens (B, L, D), and anything else as channels first.
    """
    last = isinstance(layer, nn.Linear) or (layer is None and watched.ndim == 3)
    return watched.movedim(-1, 1) if last and watched.ndim > 2 else watched
