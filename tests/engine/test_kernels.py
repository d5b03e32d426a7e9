"""The faster ways to compute must give what PyTorch's own kernels give."""

from __future__ import annotations

import pytest
import torch

from halfway.engine import kernels

aten = torch.ops.aten


@pytest.mark.parametrize("window", [([3, 3], [2, 2], [1, 1]), ([2, 2], [2, 2], [0, 0], [1, 1], True), ([3, 2],)])
def test_max_pooling_is_bit_identical_also_for_ties_and_nans(window: tuple[object, ...]) -> None:
    x = torch.randint(-3, 3, (4, 5, 9, 11), generator=torch.Generator().manual_seed(0)).float()
    x[1, 2, 3, 4] = float("nan")
    func = aten.max_pool2d_with_indices.default
    expected, found = func(x, *window), kernels.run(func, (x, *window), {})
    for e, f in zip(expected, found, strict=True):
        assert torch.equal(e.nan_to_num(9.0), f.nan_to_num(9.0)) if e.is_floating_point() else torch.equal(e, f)
        assert e.stride() == f.stride()


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("shape", [(16, 4, 12), (16, 4, 6, 7), (4, 3, 5, 6, 7)])
def test_moments_are_those_of_float64_also_far_from_zero(shape: tuple[int, ...], mean: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + mean
    x[:, 0] = mean  # a channel without variance
    axes = [0, *range(2, len(shape))]
    found = kernels.moments(x)
    assert found is not None
    torch.testing.assert_close(found[0], x.double().mean(axes).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], x.double().var(axes, correction=0).float(), rtol=1e-5, atol=1e-5)
    assert found[1].min() >= 0


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(8, 4),
        torch.randn(8, 4, 3, 3).bfloat16(),
        torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    ],
    ids=["no map", "bfloat16", "channels_last"],
)
def test_where_the_own_kernel_is_good_it_is_left_to_it(x: torch.Tensor) -> None:
    assert kernels.moments(x) is None
