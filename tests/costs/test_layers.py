"""The table of layers: which are cuts, what they cost, and what stands beside them."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halfway import Schedule
from halfway.costs.cost import cost
from halfway.costs.layers import layers
from tests.helpers.counted import (
    Tiny,
    needs_torchvision,
    tiny,
    torchvision_model,
)


@needs_torchvision
def test_layers_of_resnet18_have_the_shares_torch_counts() -> None:
    model, x = torchvision_model("resnet18"), torch.randn(2, 3, 64, 64)
    with FlopCounterMode(display=False, depth=1) as theirs:
        model(x)[0, 0].backward()
    total = theirs.get_total_flops()
    table = layers(model, x)
    assert [row.name for row in table] == [
        "maxpool",
        *(f"layer{i}{block}" for i in range(1, 5) for block in (".0", "")),
    ]
    rows = {row.name: row for row in table}
    assert rows["layer2"].output_shape == (128, 8, 8)
    assert rows["layer2"].type == "Sequential"
    forward = 0
    for name in ("conv1", "layer1", "layer2", "layer3", "layer4"):
        with FlopCounterMode(display=False) as part:
            shape = {"conv1": (3, 64), "layer1": (64, 16), "layer2": (64, 16), "layer3": (128, 8), "layer4": (256, 4)}
            channels, side = shape[name]
            model.get_submodule(name)(torch.randn(2, channels, side, side))
        forward += part.get_total_flops()
        row = rows["maxpool" if name == "conv1" else name]
        assert row.shallow_share == forward / total
        assert row.cost(0.3).step == 0.7 + 0.3 * forward / total


def test_a_module_that_runs_twice_and_the_inside_of_blocks_are_left_out() -> None:
    names = [row.name for row in layers(tiny(), torch.randn(2, 3, 16, 16))]
    assert names == ["stem", "body.0", "body"]


def test_a_connection_around_most_of_the_model_does_not_rule_out_its_layers() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(3, 4, 3, padding=1)
            self.middle = nn.Conv2d(4, 4, 3, padding=1)
            self.up = nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.down(x)
            return self.up(torch.cat([h, self.middle(h)], 1))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Skip()
            self.head = nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.net(x))

    assert [row.name for row in layers(Wrapped(), torch.randn(2, 3, 8, 8))] == ["net.down", "net.middle", "net"]


def test_layers_that_do_not_return_one_float_tensor_with_the_batch_first_are_left_out() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.turned, self.fine, self.out = Pair(), Turned(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.turned(self.pair(x)[0]).t()
            return self.out(self.fine(h))

    class Pair(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), 1

    class Turned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).t()

    assert [row.name for row in layers(Odd(), torch.randn(2, 4))] == ["fine"]


class TwoHeads(nn.Module):
    """An auxiliary head of two layers, before or after the rest of the model; the outputs in either order."""

    def __init__(self, early: bool, main_first: bool) -> None:
        super().__init__()
        self.early, self.main_first = early, main_first
        self.stem, self.body, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.aux = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 3))

    def forward(self, x: Tensor) -> Any:
        h = self.stem(x)
        aux = self.aux(h) if self.early else None
        out = self.out(self.body(h).relu_())
        aux = self.aux(h) if aux is None else aux
        return (out, aux) if self.main_first else {"aux": aux, "out": out}


@pytest.mark.parametrize("main_first", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_auxiliary_heads_are_no_cuts_wherever_they_run(early: bool, main_first: bool) -> None:
    table = layers(TwoHeads(early, main_first), torch.randn(5, 4))
    assert [row.name for row in table] == ["stem", "body"]
    # stem, body, out and aux per sample, forward and backward; there is no gradient of the input.
    stem, body, out, aux = (2.0 * n for n in (4 * 8, 8 * 8, 8 * 3, 8 * 2 + 2 * 3))
    whole = 2 * stem + 3 * (body + out + aux)
    assert table[0].shallow_share == pytest.approx(stem / whole)
    assert table[1].shallow_share == pytest.approx((stem + body + (aux if early else 0)) / whole)


def test_what_does_not_depend_on_the_batch_is_no_cut() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(len(x), 4).matmul(torch.ones(4, 4))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.mix, self.out = Positions(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mix(x + self.positions(x)))

    assert [row.name for row in layers(Model(), torch.randn(5, 4))] == ["mix"]


def test_an_output_that_no_operation_shows_rules_nothing_out() -> None:
    class Escapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(self.out(self.stem(x)).detach().numpy().copy())

    assert [row.name for row in layers(Escapes(), torch.randn(5, 4))] == ["stem"]


def test_a_dict_is_keyword_arguments() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.out = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, *, tokens: Tensor) -> Tensor:
            return self.out(self.mix(self.embed(tokens)))

    table = layers(Named(), {"tokens": torch.randint(10, (3, 5))})
    assert [(row.name, row.output_shape) for row in table] == [("embed", (5, 4)), ("mix", (5, 4))]
    assert table[0].shallow_share == 0
    # mix and out: three passes each, for all operands need gradients.
    assert table[1].shallow_share == pytest.approx(16 / (3 * (16 + 8)))


@pytest.mark.parametrize("training", [True, False])
def test_counting_leaves_no_trace(training: bool) -> None:
    class Counting(Tiny):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            random.random()
            x.mul_(2)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Counting().train(training), torch.randn(2, 3, 16, 16)
    before, x_before = copy.deepcopy(model.state_dict()), x.clone()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    layers(model, x)
    cost(model, "stem", 0.5, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert model.seen == 0
    assert model.training == training
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_hooks


def test_a_forward_pass_that_fails_leaves_no_trace() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    model.head = nn.Linear(9, 4)
    with pytest.raises(RuntimeError):
        layers(model, torch.randn(2, 3, 16, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "head" not in name)
    assert not nn.modules.module._global_forward_hooks


def test_on_the_meta_device_the_table_is_the_same() -> None:
    real = layers(tiny(), torch.randn(2, 3, 16, 16))
    assert list(layers(tiny().to("meta"), torch.randn(2, 3, 16, 16, device="meta"))) == list(real)


def test_the_table_prints_step_and_run() -> None:
    x = torch.randn(2, 3, 16, 16)
    text = str(layers(tiny(), x, schedule=Schedule(5, 80), length=90))
    assert "run p=0.5" in text
    assert "90 epochs, pruned in [5, 80)" in text
    assert "run p=" not in str(layers(tiny(), x))
    assert "8x16x16" in text
    assert "no layer" in str(layers(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)))


# -------------------------------------------------------------------------------------------------------- stages


class Staged(nn.Module):
    """Says of itself what timm's models say; `act` and `body.1` would not be shown otherwise."""

    def __init__(self, info: Any) -> None:
        super().__init__()
        self.conv, self.act, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1)))
        self.head = nn.Conv2d(4, 2, 1)
        self.feature_info = info

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.pool(self.act(self.conv(x)))))


STAGES = [{"module": "act", "reduction": 1, "num_chs": 4}, {"module": "body.1", "reduction": 2, "num_chs": 4}]


def staged(model: nn.Module) -> list[tuple[str, str]]:
    return [(row.name, row.stage) for row in layers(model, torch.randn(2, 3, 8, 8))]


def test_stages_stand_beside_what_shows_other_features_and_for_what_shows_the_same() -> None:
    shown = [("act", "0 (1/1)"), ("pool", ""), ("body.0", ""), ("body.1", "1 (1/2)")]
    assert staged(Staged(STAGES)) == shown
    assert staged(Staged(SimpleNamespace(info=STAGES))) == shown  # timm's FeatureInfo
    within = staged(nn.Sequential(Staged(STAGES), nn.Conv2d(2, 2, 1)))
    assert within == [*((f"0.{name}", stage) for name, stage in shown), ("0", "")]


@pytest.mark.parametrize(
    "info",
    [
        None,
        7,
        "act",
        {"module": "act"},
        [],
        [None, 3, "act", ("module", "act")],
        [{}, {"module": None}, {"module": ["act"]}, {"module": ""}],
        [{"module": "gone", "reduction": 4}, {"module": "act.gone"}],
        SimpleNamespace(info=5),
        torch.ones(3),
    ],
)
def test_an_odd_feature_info_is_passed_over(info: Any) -> None:
    assert staged(Staged(info)) == [("pool", ""), ("body.0", ""), ("body", "")]


@pytest.mark.parametrize("reduction", [None, "4", 0, -2, 1.5, True, [4]])
def test_an_odd_reduction_is_not_shown(reduction: Any) -> None:
    assert staged(Staged([{"module": "body.1", "reduction": reduction}]))[-1] == ("body.1", "0")


def test_a_property_called_feature_info_is_left_alone() -> None:
    class Lazy(Tiny):
        @property
        def feature_info(self) -> Any:
            raise AssertionError("called")

    assert [row.stage for row in layers(Lazy(), torch.randn(2, 3, 16, 16))] == ["", "", ""]


def test_the_stage_column_is_there_only_with_stages() -> None:
    x = torch.randn(2, 3, 8, 8)
    assert "1 (1/2)" in str(layers(Staged(STAGES), x))
    assert "out_indices" in str(layers(Staged(STAGES), x))
    assert "stage" not in str(layers(Staged(None), x))
