"""The replay on real models: exact gradients, the predicted cost, in the usual circumstances."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import halfway
from tests.helpers.replays import (
    IMAGES,
    bert,
    blocked,
    density,
    freeze_batch_norm,
    gradients,
    plain_net,
    relative_difference,
    scalar,
    vision,
)


@pytest.mark.parametrize("name", IMAGES)
def test_replayed_gradients_are_those_of_the_retained_samples(name, feature):
    build, at, size = IMAGES[name]
    model = freeze_batch_norm(build().train())
    x = torch.randn(6, 3, size, size)
    blocker = halfway.ForwardBlocker(model, at, 0.5, selector=density(), reuse="replay")
    for _ in range(2):
        retained = blocker(x)
        found = gradients(model, retained)
    assert blocker.stats.steps_replayed == 2
    assert blocker.stats.operations_replayed > 0
    assert blocker.stats.operations_computed == 0
    feature("models", f"{name}, cut at `{at}`", blocker.stats)
    blocker.remove()
    assert relative_difference(found, gradients(model, x[blocker.last.indices])) < 1e-5


def test_bert_called_with_keywords_replays(feature):
    model = bert().train()
    batch = {"input_ids": torch.randint(0, 50, (6, 7)), "attention_mask": torch.ones(6, 7, dtype=torch.int64)}
    blocker = halfway.ForwardBlocker(model, "encoder.layer.0.output", 0.5, selector=density(), reuse="replay")
    retained = blocker(**batch)
    found = gradients(model, **retained)
    assert blocker.stats.steps_replayed == 1
    feature("models", "BERT called with keywords, cut at `encoder.layer.0.output`", blocker.stats)
    blocker.remove()
    assert relative_difference(found, gradients(model, **{k: v[blocker.last.indices] for k, v in batch.items()})) < 1e-5


def test_a_replayed_step_costs_what_was_predicted():
    model = freeze_batch_norm(vision().resnet18().train())
    x = torch.randn(10, 3, 32, 32)
    with FlopCounterMode(display=False) as full:
        gradients(model, x)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.4, selector=density(), reuse="replay")
    gradients(model, blocker(x))
    with FlopCounterMode(display=False) as counter:
        gradients(model, blocker(x))
    relative = counter.get_total_flops() / full.get_total_flops()
    assert relative == pytest.approx(blocker.stats.relative_flops, abs=0.005)
    assert relative < 0.66


# --------------------------------------------------------------------------------------- the usual circumstances


def test_autocast_around_the_model_only_replays_from_the_second_step_on():
    model = vision().resnet18().train()
    x = torch.randn(8, 3, 32, 32)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.5, selector=density())
    for _ in range(3):
        retained = blocker(x)
        with torch.autocast("cpu", torch.bfloat16):
            loss = scalar(model(retained))
        loss.backward()
    assert blocker.stats.steps_replayed == 2


def test_channels_last_is_kept():
    model = vision().resnet18().train().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.5, selector=density(), reuse="replay")
    seen = []
    model.layer1.register_forward_hook(lambda m, a, o: seen.append(o.is_contiguous(memory_format=torch.channels_last)))
    retained = blocker(x)
    assert retained.is_contiguous(memory_format=torch.channels_last)
    gradients(model, retained)
    assert all(seen)
    assert blocker.stats.steps_replayed == 1


def test_gradients_accumulate_over_several_blocked_batches(x):
    model = plain_net()
    blocker = blocked(model, reuse="replay")
    model.zero_grad()
    parts = []
    for shift in (0.0, 1.0):
        parts.append(blocker(x + shift))
        model(parts[-1]).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    blocker.remove()
    model.zero_grad()
    model(torch.cat(parts)).square().sum().backward()
    assert relative_difference(found, {n: p.grad for n, p in model.named_parameters()}) < 1e-6
