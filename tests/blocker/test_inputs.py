"""What goes into the blocker comes back in the same form, and the model is called with its part of it."""

import copy

import pytest
import torch

from halfway import ForwardBlocker
from tests.helpers.training_loop import (
    Plain,
    vectors,
)


def test_one_part_comes_back_as_itself_several_as_a_tuple_names_as_a_dict():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5)
    x, y = vectors(1)[0]
    one = blocker(x)
    assert isinstance(one, torch.Tensor)
    model(one)
    both = blocker(x, y)
    assert isinstance(both, tuple)
    model(both[0])
    named = blocker(x=x, target=y)
    assert list(named) == ["x", "target"]
    assert len(named["x"]) == len(named["target"]) == 5
    model(x=named["x"])
    assert blocker.stats.recompute_reasons == {}
    assert blocker.stats.steps_replayed == 3


class TwoInputs(Plain):
    def forward(self, a, b):
        return super().forward(a * b)


def test_a_tuple_goes_to_the_model_as_positionals():
    model = TwoInputs()
    blocker = ForwardBlocker(model, "stem", 0.5)
    a, b, y = torch.randn(8, 4), torch.randn(8, 4), torch.arange(8)
    (a_, b_), y_ = blocker((a, b), y)
    assert torch.equal(a_, a[y_])
    assert torch.equal(b_, b[y_])
    model(a_, b_)
    assert blocker.stats.steps_replayed == 1


def test_a_dict_goes_to_the_model_as_keywords_in_any_order():
    model = TwoInputs()
    blocker = ForwardBlocker(model, "stem", 0.5)
    batch, y = {"b": torch.randn(8, 4), "a": torch.randn(8, 4)}, torch.arange(8)
    part, y_ = blocker(batch, y)
    assert torch.equal(part["a"], batch["a"][y_])
    model(part["a"], part["b"])
    assert blocker.stats.steps_replayed == 1


def test_inputs_says_which_parts_go_to_the_model():
    model = TwoInputs()
    blocker = ForwardBlocker(model, "stem", 0.5)
    a, b, y = torch.randn(8, 4), torch.randn(8, 4), torch.arange(8)
    y_, a_, b_ = blocker(y, a, b, inputs=(1, 2))
    assert torch.equal(a_, a[y_])
    model(a_, b_)
    part = blocker(y=y, left=a, right=b, a=a, inputs=None, b=b)
    model(part["a"], b=part["b"])
    assert torch.equal(part["left"], part["a"])
    assert blocker.stats.steps_replayed == 2

    one = Plain()
    with ForwardBlocker(one, "stem", 0.5) as blocker:
        y_, a_ = blocker(y, a, inputs=1)
        one(a_)
        assert torch.equal(a_, a[y_])
        assert blocker.stats.steps_replayed == 1


def test_inputs_names_parts_for_a_model_with_open_keywords():
    class Open(Plain):
        def forward(self, **batch):
            return super().forward(batch["pixels"])

    model = Open()
    blocker = ForwardBlocker(model, "stem", 0.5)
    pixels, y = torch.randn(8, 4), torch.arange(8)
    with pytest.raises(ValueError, match=r"inputs=\["):
        blocker(pixels=pixels, y=y)
    part = blocker(pixels=pixels, y=y, inputs=["pixels"])
    model(pixels=part["pixels"])
    assert torch.equal(part["pixels"], pixels[part["y"]])
    assert blocker.stats.steps_replayed == 1


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config).train()


@pytest.mark.parametrize("style", ["dict", "keywords"])
def test_a_bert_called_with_a_dict_trains_as_on_the_retained_samples(style):
    model = bert()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "bert.encoder.layer.0.output", 0.5)
    mask = torch.ones(8, 7, dtype=torch.int64)
    mask[::2, 5:] = 0
    batch = {"input_ids": torch.randint(50, (8, 7)), "attention_mask": mask, "labels": torch.randint(3, (8,))}
    for _ in range(2):
        part = blocker(batch) if style == "dict" else blocker(**batch)
        rows = blocker.last.indices
        assert len(rows) == 4
        assert all(torch.equal(part[k], v[rows]) for k, v in batch.items())
        model.zero_grad()
        plain.zero_grad()
        model(**part).loss.backward()
        plain(**{k: v[rows] for k, v in batch.items()}).loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert blocker.stats.steps_replayed == 2
