"""A network that learns CIFAR-10 in few passes: its first layer is computed from the images, not trained.

The ideas are those of the speed-running literature (Page; Jordan, https://arxiv.org/abs/2404.00498): whitened patches,
convolutions that begin as identities, small logits. The code and the proportions are ours: the first stage is narrow,
so that most of the work lies behind it, where a pruned sample does not go.

Shapes: B samples, C channels, H x W px, K values of a patch, N patches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2
COLOURS = 3
VALUES = COLOURS * PATCH**2  # of a patch


class Whitening(nn.Module):
    """Patches of 2 x 2 px as values of mean square 1 that do not correlate, each also with its sign reversed, so that
    ReLU loses nothing. Never trained.

    Until `prepare` has seen images, the filters are averages and differences over a patch and over its colours.

    Args:
        floor: added to the mean squares that are divided by, as a share of the largest: the faintest directions are
            noise, and dividing by next to nothing would make them loud.
    """

    filters: Tensor

    def __init__(self, floor: float = 1e-4) -> None:
        super().__init__()
        self.floor = floor
        pairs = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
        colours = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
        colours = colours / colours.norm(dim=1, keepdim=True)
        self.register_buffer("filters", _both_signs(torch.kron(colours, torch.kron(pairs, pairs))))

    @property
    def channels(self) -> int:
        """Of the output."""
        return len(self.filters)

    @torch.no_grad()
    def prepare(self, x: Tensor) -> None:
        """Compute the filters from images (B, 3, H, W), normalised as in training."""
        products_KK, patches = torch.zeros(VALUES, VALUES, dtype=torch.float64), 0
        for part in x.cpu().split(256):  # all patches at once would take far more memory than the images
            patches_NK = F.unfold(part.double(), PATCH).transpose(1, 2).flatten(0, 1)
            products_KK += patches_NK.T @ patches_NK
            patches += len(patches_NK)
        squares_K, directions_KK = torch.linalg.eigh(products_KK / patches)
        rows_KK = directions_KK.T.flip(0)  # the largest first
        # An eigenvector has no sign of its own; with this one it does not depend on the solver.
        largest_K1 = rows_KK.gather(1, rows_KK.abs().argmax(1, keepdim=True))
        scale_K = (squares_K.flip(0) + self.floor * squares_K[-1]).rsqrt()
        self.filters.copy_(_both_signs(rows_KK * largest_K1.sign() * scale_K[:, None]))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.filters)


class ScaledLinear(nn.Linear):
    """A linear layer without bias whose outputs are multiplied by a constant."""

    def __init__(self, inputs: int, outputs: int, scale: float) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def speedrun(classes: int, widths: Sequence[int] = (32, 128, 128), scale: float = 1 / 9) -> nn.Module:
    """Whitened patches, then stages of two 3 x 3 convolutions that each halve the resolution.

    Args:
        widths: channels of the stages `layer1`, `layer2`, ...
        scale: of the logits.
    """
    whitening = Whitening()
    layers: OrderedDict[str, nn.Module] = OrderedDict(whitening=whitening, relu=nn.ReLU())
    channels = whitening.channels
    for i, width in enumerate(widths):
        layers[f"layer{i + 1}"] = nn.Sequential(
            _identity(channels, width),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _identity(width, width),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        channels = width
    layers.update(pool=nn.AdaptiveMaxPool2d(1), flatten=nn.Flatten(), fc=ScaledLinear(channels, classes, scale))
    return nn.Sequential(layers)


def prepare(model: nn.Module, images: Callable[[], Tensor]) -> None:
    """Show images to the layers that are computed from them, before training begins; most models have none, and then
    `images` is not called."""
    layers = [module for module in model.modules() if isinstance(module, Whitening)]
    if layers:
        x = images()
        for layer in layers:
            layer.prepare(x)


def _both_signs(rows_KK: Tensor) -> Tensor:
    return torch.cat([rows_KK, -rows_KK]).float().view(-1, COLOURS, PATCH, PATCH)


def _identity(channels: int, width: int) -> nn.Conv2d:
    """A convolution whose first outputs are its inputs; the others begin with random weights."""
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:channels])
    return conv
