"""Counting FLOPs: by hand, and against what the backward pass really runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halfway.engine.flops import FlopCounter, Meter
from tests.helpers.counted import (
    counted,
    metered,
    needs_timm,
    needs_torchvision,
    tiny,
    torchvision_model,
)

CONVOLUTION = 2 * 3 * 3 * 8 * 8 * 16 * 16  # of Tiny on one 16 x 16 image, without the stem's


def frozen_stem() -> nn.Module:
    model = tiny()
    model.stem.requires_grad_(False)
    return model


class NoGradStem(nn.Module):
    """The stem's weights require grad, but the forward pass does not let them have any."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.stem(x)
        return self.head(h)


class Transposed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2),
            nn.Conv2d(6, 6, 3, padding=1, groups=6),
        )


def test_meter_counts_by_hand() -> None:
    meter = metered(tiny(), torch.randn(2, 3, 16, 16))
    stem, head = 2 * 2 * 3 * 3 * 3 * 8 * 16 * 16, 2 * 2 * 8 * 4
    assert meter.forward == stem + 7 * 2 * CONVOLUTION + head
    # The images need no gradient; everything else has two operands that do.
    assert meter.backward == stem + 2 * (7 * 2 * CONVOLUTION + head)


@pytest.mark.parametrize("make", [tiny, frozen_stem, NoGradStem, Transposed])
def test_meter_predicts_the_backward_pass_of_small_models(make: Any) -> None:
    model, x = make(), torch.randn(3, 3, 17, 17)
    meter = metered(model, x)
    assert meter.forward + meter.backward == counted(model, x)


@needs_torchvision
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "swin_t"])
def test_meter_predicts_the_backward_pass_of_torchvision_models(name: str) -> None:
    model, x = torchvision_model(name), torch.randn(2, 3, 64, 64)
    meter = metered(model, x)
    assert meter.forward + meter.backward == counted(model, x)


@needs_timm
def test_meter_predicts_the_backward_pass_of_fused_attention() -> None:
    import timm

    model, x = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3), torch.randn(2, 3, 64, 64)
    meter = metered(model, x)
    assert meter.forward + meter.backward == counted(model, x)


def test_meter_knows_fused_attention_on_the_cpu() -> None:
    q = torch.randn(2, 3, 5, 4, requires_grad=True)
    with Meter() as meter, FlopCounter() as counter:
        out = nn.functional.scaled_dot_product_attention(q, q, q)
    products = 2 * (2 * 3) * (2 * 5 * 5 * 4)
    assert meter.forward == counter.total == products
    assert meter.backward == 2.5 * products
    with FlopCounter() as counter:
        out.sum().backward()
    assert counter.total == 2.5 * products


def test_counter_agrees_with_torch_without_groups_and_is_right_with_them() -> None:
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    for groups in (1, 2, 8):
        layer = nn.Conv2d(8, 8, 3, groups=groups)
        with FlopCounterMode(display=False) as theirs, FlopCounter() as ours:
            out = layer(x)
            forward = ours.total
            out.sum().backward()
        assert forward == 2 * 2 * 7 * 7 * 9 * 8 * 8 // groups
        assert ours.total == 3 * forward
        assert (theirs.get_total_flops() == ours.total) == (groups == 1)
