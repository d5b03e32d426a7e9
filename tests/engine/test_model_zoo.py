"""Models of four libraries, trained with a blocker and without: the same gradients, the same outputs, the same model.

Ten of them run in the default suite. `make zoo-matrix` runs all, and writes what was seen into docs/compatibility.md.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

import halfway
from tests import ROOT
from tests.helpers.matrix import ZOO
from tests.helpers.model_zoo import CASES, Case
from tests.helpers.replays import freeze_batch_norm

BATCH, STEPS = 6, 3
BOUND = 1e-4


def as_parameter(case: Case) -> Any:
    marks = [] if case.sample else [pytest.mark.slow]
    if case.may_recompute:
        marks.append(pytest.mark.filterwarnings("ignore::UserWarning:halfway"))
    return pytest.param(case, id=f"{case.family}: {case.name}", marks=marks)


def call(callee: Any, batch: Any) -> Any:
    return callee(**batch) if isinstance(batch, Mapping) else callee(batch)


def rows_of(batch: Any, rows: Tensor) -> Any:
    return {k: v[rows] for k, v in batch.items()} if isinstance(batch, Mapping) else batch[rows]


def tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif output is not None:
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(part)


def settled(model: nn.Module, batch: Any) -> nn.Module:
    """The model in training mode, with nothing left in it that would make the comparison blind or impossible.

    Whatever starts constant (zero-initialised branches, layer scales of 1e-6) gets noise, and small weights the usual
    size: no gradient would come through, and no error show. BatchNorm is frozen with the statistics of a batch, or the
    activations of some deep nets overflow. They are taken from a copy: the model's own first call must be halfway's,
    for some models set themselves up in it.
    """
    with torch.no_grad():
        for p in model.parameters():
            if p.min() == p.max():
                p.add_(0.1 * torch.randn_like(p))
            elif p.dim() > 1:
                p.mul_((p[0].numel() ** -0.5 / p.std()).clamp(min=1))
    other = copy.deepcopy(model).train()
    for module in other.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = None  # the mean over all batches, of which there is one
    with torch.no_grad():
        call(other, batch)
    for module, seen in zip(model.modules(), other.modules(), strict=True):
        if isinstance(module, _BatchNorm):
            module.load_state_dict(seen.state_dict())
    freeze_batch_norm(model.train())
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    return model


def loss_of(output: Any) -> Tensor:
    """The distance to a random target: squares alone would have no gradient behind a LayerNorm."""
    generator = torch.Generator().manual_seed(0)
    parts = [t for t in tensors(output) if t.is_floating_point()]
    return torch.stack([(t - torch.randn(t.shape, generator=generator)).square().mean() for t in parts]).sum()


def step(model: nn.Module, batch: Any) -> tuple[Any, dict[str, Tensor]]:
    """Outputs and gradients of a training step."""
    model.zero_grad()
    output = call(model, batch)
    loss_of(output).backward()
    return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if b.is_floating_point()}


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest one, in norm, with a floor for tensors that are next to nothing. NaN is larger than everything."""
    assert found.keys() == expected.keys()
    assert all(found[n].shape == e.shape for n, e in expected.items())
    if not expected:
        return 0.0
    norms = torch.stack([e.double().norm() for e in expected.values()])
    differences = torch.stack([(found[n].double() - e.double()).norm() for n, e in expected.items()])
    return (differences / (norms + 1e-3 * norms.max())).max().item()


def output_difference(found: Any, expected: Any) -> float:
    """As above, of two outputs: they must have equally many tensors."""
    named = [{str(i): t for i, t in enumerate(tensors(output))} for output in (found, expected)]
    return relative_difference(*named)


def structure(model: nn.Module) -> list[Any]:
    """The module tree: names, types, attributes and the number of hooks of each kind."""
    return [
        (name, type(m), sorted(vars(m)), {k: len(v or ()) for k, v in vars(m).items() if k.endswith("_hooks")})
        for name, m in model.named_modules()
    ]


def check_unchanged(model: nn.Module, plain: nn.Module, batch: Any) -> None:
    """`model`, which halfway has left, is what `plain` is, and does what it does, to the bit."""
    for training in (True, False):
        if not training:
            model.eval(), plain.eval()
        with torch.no_grad():
            found, expected = list(tensors(call(model, batch))), list(tensors(call(plain, batch)))
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    assert structure(model) == structure(plain)
    found, expected = model.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("case", [as_parameter(case) for case in CASES])
def test_a_model_trains_on_the_retained_samples_and_stays_what_it_is(case: Case, feature: Any) -> None:
    model = settled(case.build(), case.inputs(BATCH))
    plain = copy.deepcopy(model)
    blocker = halfway.ForwardBlocker(model, at=case.at, prune_ratio=0.5)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    error = 0.0
    for _ in range(STEPS):
        batch = case.inputs(BATCH)
        found, gradients = step(model, call(blocker, batch))
        assert blocker.last is not None
        expected, expected_gradients = step(plain, rows_of(batch, blocker.last.indices))
        errors = [
            output_difference(found, expected),
            relative_difference(gradients, expected_gradients),
            relative_difference(floating_buffers(model), floating_buffers(plain)),
        ]
        assert all(e < BOUND for e in errors), errors
        error = max(error, *errors[1:])
        # Both make the same step: each gradient is compared, not what differences become over several steps.
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    stats = blocker.stats
    assert stats.steps_replayed + stats.steps_recomputed == STEPS
    assert sum(stats.recompute_reasons.values()) == stats.steps_recomputed
    if not case.may_recompute:
        assert stats.steps_replayed == STEPS, stats.recompute_reasons
        assert stats.operations_replayed > 0
    seen = {}
    if stats.steps_replayed and stats.operations_computed:
        # Nobody says anything of operations that were computed in the first steps only.
        why = dict.fromkeys(re.findall(r"  computed:? (.+)$", blocker.explain(), re.MULTILINE)) or ["at first"]
        seen["why"] = "some computed: " + "; ".join(why)
    blocker.remove()
    check_unchanged(model, plain, case.inputs(BATCH))
    operations = f"{stats.operations_replayed} / {stats.operations_computed}" if stats.steps_replayed else ""
    error_in_words = f"{error:.0e}" if error else "0"
    seen.update(cut=case.at, operations=operations, error=error_in_words)
    feature(ZOO + case.family, case.name, stats, **seen)


def test_the_zoo_has_models_of_every_library_and_a_sample_of_ten() -> None:
    sizes = Counter(case.family for case in CASES)
    assert sizes["timm"] >= 60
    assert sizes["torchvision"] >= 14
    assert sizes["segmentation_models_pytorch"] >= 12
    assert sizes["Hugging Face"] >= 12
    sample = [case for case in CASES if case.sample]
    assert len(sample) == 10
    assert {case.family for case in sample} == set(sizes)
    assert len({(case.family, case.name) for case in CASES}) == len(CASES)


def test_the_compatibility_page_has_a_row_for_every_model_of_the_zoo(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--zoo-matrix"):
        pytest.skip("the page is written when all tests have run")
    page = (ROOT / "docs" / "compatibility.md").read_text()
    missing = [case.name for case in CASES if f"| {case.name} | `{case.at}` | " not in page]
    assert missing == [], "run `make zoo-matrix`"
