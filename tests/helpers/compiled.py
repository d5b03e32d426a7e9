"""Models to compile behind their cut, and a compiler that counts its graphs."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import halfway
from halfway import Density, ForwardBlocker
from halfway.modules import is_compiled

N, CLASSES = 16, 5


class Counting:
    """A backend that counts the graphs it gets, and hands them on to another."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs = 0
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)


class Block(nn.Module):
    """Of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class ResNet(nn.Module):
    """Stages are `nn.Sequential`s, whose code is one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1, self.layer2, self.layer3 = (nn.Sequential(Block(8), nn.ReLU()) for _ in range(3))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layer3(self.layer2(self.layer1(self.stem(x))))).flatten(1))


class Layer(nn.Module):
    """Of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Its layers are in an `nn.ModuleList`, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 2, stride=2)
        self.blocks = nn.ModuleList(Layer(16) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def batch(step: int, size: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def blocked(model: nn.Module, at: str, **settings: Any) -> ForwardBlocker:
    return ForwardBlocker(model, at, 0.5, **{"selector": Density(num_centroids=4), **settings})


def compiled_parts(model: nn.Module) -> list[str]:
    """Names of the submodules that are compiled."""
    return [name for name, module in model.named_modules() if is_compiled(module)]


def first_call(model: nn.Module) -> nn.Module:
    """The call that shows what to compile, and the one that begins with it."""
    for _ in range(2):
        step(model.train(), None, *batch(0))
    return model


def step(model: nn.Module, blocker: ForwardBlocker | None, x: Tensor, y: Tensor) -> Tensor:
    """A training step without the optimizer's; returns the loss."""
    model.zero_grad()
    if blocker is not None:
        x, y = blocker(x, y)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def pair(model: nn.Module, at: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A copy that stays eager, and the model, which will be compiled after `at`."""
    eager = copy.deepcopy(model)
    return eager, halfway.compile(model, at=at, **{"backend": "eager", **options})


def assert_same_gradients(found: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}), msg=name)
