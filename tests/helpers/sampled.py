"""Every sampler, losses to feed them with, and a small data set."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from halfway.samplers import (
    SAMPLERS,
)

N = 30

EVERY = [*((name, {}) for name in sorted(SAMPLERS)), ("rs2", {"replacement": False}), ("infobatch", {"threshold": 0.6})]


def loss_table(epochs: int, samples: int = N, seed: int = 0) -> list[list[float]]:
    """A loss for every visit, such that no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.rand(epochs, samples, generator=generator, dtype=torch.float64)).tolist()


def feed(sampler: Any, losses: list[float], ids: list[int] | None = None, batch: int = 7) -> list[int]:
    """An epoch of training: the ids it met, in batches, each told to the sampler."""
    ids = [int(i) for i in sampler] if ids is None else ids
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        sampler.observe(torch.tensor(part), torch.tensor([losses[i] for i in part]))
    return ids


def assert_highest(retained: list[int], scores: dict[int, float], count: int, samples: int = N) -> None:
    """Exactly `count`: first those without a score, then the highest."""
    unknown = set(range(samples)) - set(scores)
    assert len(retained) == count == len(set(retained))
    if len(unknown) >= count:
        assert set(retained) <= unknown
        return
    ranking = sorted(scores, key=lambda i: -scores[i])
    assert set(retained) == unknown | set(ranking[: count - len(unknown)])


class Squares(Dataset):
    def __init__(self, kind: str = "tuple") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor(float(index) ** 2)
        return {"tuple": (x, -index), "mapping": {"x": x}, "tensor": x}[self.kind]


def leaves(state: dict[str, Any]) -> list[Any]:
    return [
        leaf for key in sorted(state) for leaf in (leaves(state[key]) if isinstance(state[key], dict) else [state[key]])
    ]
