"""What goes to the model from a batch by name, and that the call is then recognised and replayed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfway import ForwardBlocker


class Switched(nn.Module):
    """Says in its signature what it needs, and takes switches for how to run in **kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Any:
        self.seen.append(kwargs)
        h = self.stem(x)
        h = h.tanh() if kwargs.get("act") == "tanh" else h.relu()
        out = self.head(h * kwargs.get("scale", 1.0))
        return (out, h) if kwargs.get("output_hidden_states") else out


class Strict(Switched):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return super().forward(x, scale=scale)


SWITCHES: dict[str, dict[str, Any]] = {
    "bool": {"output_hidden_states": True},
    "off": {"output_hidden_states": False},
    "word": {"act": "tanh"},
    "number": {"scale": 2.0},
    "whole number": {"scale": 3},
    "None": {"return_dict": None},
    "several": {"output_hidden_states": True, "act": "tanh", "scale": 0.5},
}


@pytest.mark.parametrize("case", SWITCHES)
def test_plain_values_by_name_go_to_a_model_with_kwargs(case: str) -> None:
    """`model(**batch)` is the call that was prepared: the probe ran with the same switches."""
    switches, model = SWITCHES[case], Switched()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "stem", 0.5, reuse="replay")
    for _ in range(3):
        batch = blocker(x=torch.randn(8, 6), **switches)
        assert {name: batch[name] for name in switches} == switches
        outputs, expected = model(**batch), plain(**batch)
        for found, reference in zip(*((o if isinstance(o, tuple) else (o,)) for o in (outputs, expected)), strict=True):
            torch.testing.assert_close(found, reference)
    assert blocker.stats.steps_replayed == 3
    assert all(kwargs == switches for kwargs in model.seen)


def test_a_switch_that_the_model_is_called_without_is_another_call() -> None:
    model = Switched()
    blocker = ForwardBlocker(model, "stem", 0.5)
    batch = blocker(x=torch.randn(8, 6), output_hidden_states=True)
    with pytest.warns(UserWarning, match="called with other arguments"):
        model(batch["x"])
    assert blocker.stats.steps_recomputed == 1


def test_what_belongs_to_samples_is_only_cut() -> None:
    """Tensors, arrays and lists whose names forward does not have are not sent into its **kwargs."""
    model = Switched()
    blocker = ForwardBlocker(model, "stem", 0.5)
    names = list("abcdefgh")
    batch = blocker(x=torch.randn(8, 6), y=torch.arange(8), weight=torch.tensor(2.0), names=names, scale=2.0)
    assert all(kwargs == {"scale": 2.0} for kwargs in model.seen)
    model(batch["x"], scale=batch["scale"])
    assert blocker.last is not None
    assert blocker.stats.steps_replayed == 1
    assert batch["names"] == [names[i] for i in blocker.last.indices]


def test_inputs_still_says_otherwise() -> None:
    model = Switched()
    blocker = ForwardBlocker(model, "stem", 0.5)
    batch = blocker(x=torch.randn(8, 6), note="first epoch", inputs=["x"])
    assert all(kwargs == {} for kwargs in model.seen)
    model(batch["x"])
    assert blocker.stats.steps_replayed == 1


def test_a_model_without_kwargs_gets_what_it_has_names_for() -> None:
    model = Strict()
    blocker = ForwardBlocker(model, "stem", 0.5)
    batch = blocker(x=torch.randn(8, 6), scale=2.0, note="first epoch")
    model(batch["x"], scale=2.0)
    assert blocker.stats.steps_replayed == 1


@pytest.mark.parametrize("switch", ["output_hidden_states", "output_attentions"])
def test_a_hugging_face_model_is_replayed_with_its_switches(switch: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "bert.encoder.layer.0", 0.5, reuse="replay")
    for _ in range(3):
        batch = blocker(input_ids=torch.randint(50, (8, 5)), attention_mask=torch.ones(8, 5), **{switch: True})
        assert batch[switch] is True
        outputs, expected = model(**batch), plain(**batch)
        torch.testing.assert_close(outputs.logits, expected.logits)
        name = switch.removeprefix("output_")
        assert len(outputs[name]) == len(expected[name])
        for found, reference in zip(outputs[name], expected[name], strict=True):
            torch.testing.assert_close(found, reference)
    assert blocker.stats.steps_replayed == 3
