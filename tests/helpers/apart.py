"""Train a model beside a plain copy of it, and say in which steps the two differ.

For the tests of what a replay must never get wrong: samples that see each other, draws, values read on the host. The
reference is always a deep copy that runs plainly, without a blocker:

- on the retained samples alone, for a model that draws no random numbers before the cut;
- for one that does (`draws=True`), in a replayed step on all samples, with the same draws, and the output of the cut
  indexed; in a recomputed step on the retained samples alone, from where the generators were after the blocker.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import halfway
from halfway.selectors import Ranking

# Of the norm of a parameter's gradient, or of a tenth of the largest one: what rounding in float32 does not reach.
TOLERANCE = 1e-5


class Net(nn.Module):
    """Two linear layers with `between` between them, then the cut, then the head."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 16, inputs: int = 16) -> None:
        super().__init__()
        self.a = nn.Linear(inputs, width)
        self.between = between
        self.b = nn.Linear(width, width)
        self.cut = nn.Identity()
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cut(self.b(self.between(self.a(x)))))


class Chosen(Ranking):
    """Retains the rows the test asks for: those whose `scores` are largest."""

    name = "chosen"
    needs = "features"
    scores: Tensor | None = None

    def importance(self, candidates: Any) -> Tensor:
        return torch.arange(candidates.size).float() if self.scores is None else self.scores


@dataclass
class Outcome:
    """What a training did: per step the error of its gradients and whether it was replayed; the blocker's numbers."""

    errors: list[float] = field(default_factory=list)
    replayed: list[bool] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    stats: halfway.Stats | None = None

    @property
    def worst(self) -> float:
        return max(self.errors)

    @property
    def wrong(self) -> list[int]:
        return [i for i, e in enumerate(self.errors) if not e <= TOLERANCE]

    def assert_right(self, about: Any = "") -> Outcome:
        assert not self.wrong, (
            f"gradients wrong in steps {self.wrong} of {len(self.errors)}, by up to {self.worst:.3g}; "
            f"replayed {sum(self.replayed)}, {self.stats and self.stats.recompute_reasons} {about}"
        )
        return self

    def assert_all_replayed(self) -> Outcome:
        assert all(self.replayed), self.stats.recompute_reasons
        return self


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    ratio: float = 0.5,
    *,
    at: str = "cut",
    reuse: str = "auto",
    draws: bool = False,
    selector: Any = None,
    scores: Iterable[Tensor] | None = None,
    rate: float = 0.05,
) -> Outcome:
    """Train on `batches` with a blocker and compare the gradients and buffers of every step with the reference.

    scores: one tensor per batch; the rows with the largest ones are retained.
    """
    if scores is not None:
        selector, scores = Chosen(), iter(scores)
    blocker = halfway.ForwardBlocker(
        model, at, ratio, selector=selector or halfway.Density(num_centroids=4), reuse=reuse
    )
    optimizer = torch.optim.SGD(model.parameters(), rate) if rate else None
    outcome = Outcome()
    with blocker, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="halfway computes")
        for x in batches:
            if scores is not None:
                blocker.selector.scores = next(scores)
            plain = copy.deepcopy(model)
            before = torch.get_rng_state()
            retained = blocker(x)
            after = torch.get_rng_state()
            found = gradients(model, retained)
            end = torch.get_rng_state()
            stats, rows = blocker.stats, blocker.last.indices
            replayed = stats.steps_replayed > sum(outcome.replayed)
            if draws and replayed:
                torch.set_rng_state(before)
                with indexed(plain, at, rows):
                    expected = gradients(plain, x)
            else:
                torch.set_rng_state(after)
                expected = gradients(plain, x[rows])
                assert_same_buffers(model, plain)
            assert torch.equal(end, torch.get_rng_state()), "the generator is not where a plain run would leave it"
            outcome.errors.append(error(found, expected))
            outcome.replayed.append(replayed)
            outcome.rows.append(rows)
            outcome.stats = stats
            if optimizer is not None:
                optimizer.step()
    return outcome


def gradients(model: nn.Module, *args: Any) -> dict[str, Tensor]:
    """Of a loss of whatever the model returns for these arguments."""
    model.zero_grad()
    out = model(*args)
    sum(o.float().square().mean() for o in (out if isinstance(out, tuple) else (out,))).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a parameter's gradient, relative to its norm (or a tenth of the largest norm)."""
    assert found.keys() == expected.keys()
    least = 0.1 * max(g.norm().item() for g in expected.values())
    errors = [(found[n] - g).norm().item() / max(g.norm().item(), least) for n, g in expected.items()]
    return max(e if e == e else float("inf") for e in errors)


@contextlib.contextmanager
def indexed(model: nn.Module, at: str, rows: Tensor) -> Iterator[None]:
    """The output of the cut is reduced to these rows."""
    handle = model.get_submodule(at).register_forward_hook(lambda module, args, output: output[rows])
    try:
        yield
    finally:
        handle.remove()


def assert_same_buffers(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"buffer {name}: {m}")


def normal_batches(steps: int, *shape: int, seed: int = 0) -> list[Tensor]:
    """Batches of standard normal numbers, the same ones for the same seed; the global generator is not touched."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]
