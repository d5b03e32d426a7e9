"""`halfway.advise` from end to end, on an invented clock."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import halfway
from halfway.advice import Advice, advice, advise, words
from halfway.advice.evidence import Evidence
from halfway.advice.recommend import Costs, Recommendation

from .invented import Ticking, controls, evidence, method, net, pairs, rung, takes_a_second, takes_time


@pytest.fixture(autouse=True)
def _invented_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking.time, Ticking.tick = 0.0, 0.01
    monkeypatch.setattr(advice, "Clock", Ticking)


def advised(known: Evidence | None = None, time: Any = takes_time, **more: Any) -> Advice:
    """On a net whose last layer takes one second per sample: steps of 8 s, of which half is saved."""
    model = net()
    model[5].register_forward_pre_hook(time)  # type: ignore[operator]
    given: dict[str, Any] = {"epochs": 20, "seconds": 1000, "evidence": known or Evidence(), "loader": pairs()}
    return advise(model, **{**given, **more})


EVERYWHERE = {"last_loss_hard": method("last_loss_hard", (0.9, 0.4, 1.4)), "no": method("density", (-1.0, -1.5, -0.5))}


def everywhere(random_over_shorter: float, which: str) -> Evidence:
    """The same on rungs of every share."""
    arms = (*controls(random_over_shorter), EVERYWHERE[which])
    return evidence(*(rung(f"rung-{i}", i / 4, *arms) for i in range(5)))


def test_it_is_a_name_of_the_package_that_is_imported_when_asked_for() -> None:
    assert halfway.advise is advise
    assert "advise" in halfway.__all__
    with pytest.raises(AttributeError, match="advize"):
        _ = halfway.advize


def test_the_users_model_optimizer_loader_and_generators_are_left_as_they_were() -> None:
    data = TensorDataset(torch.randn(48, 4), torch.randint(3, (48,)))
    loader = DataLoader(data, 8, shuffle=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    F.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    optimizer.step()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    expected = list(loader)
    torch.set_rng_state(random)

    advise(model, loader, epochs=5, optimizer=optimizer, seconds=8)

    assert torch.equal(torch.get_rng_state(), random)
    for mine, theirs in zip(loader, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for key, value in weights.items():
        assert torch.equal(model.state_dict()[key], value), key
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, g)
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    for i, entry in state["state"].items():
        assert torch.equal(now["state"][i]["momentum_buffer"], entry["momentum_buffer"])


class Tempered(nn.Module):
    """A loss with a parameter and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs * self.temperature, y)


def test_a_loss_with_parameters_is_left_as_it_was_and_trained_in_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            trained.append(self.param_groups[0]["params"][-1].grad)
            return super().step(closure)

    model, loss_fn = net(), Tempered()
    optimizer = Watched([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    advise(model, pairs(), epochs=5, optimizer=optimizer, loss_fn=loss_fn, seconds=8)
    assert loss_fn.temperature.grad is None
    assert loss_fn.temperature.item() == 1
    assert float(loss_fn.calls) == 0
    assert any(gradient is not None and float(gradient) != 0 for gradient in trained)


@pytest.mark.parametrize("before", [False, True])
def test_a_loss_that_holds_the_model_itself_leaves_no_gradient_on_it(before: bool) -> None:
    model = net()
    expected = [torch.full_like(p, 0.5) if before else None for p in model.parameters()]
    for p, gradient in zip(model.parameters(), expected, strict=True):
        p.grad = None if gradient is None else gradient.clone()

    def loss_fn(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + sum(p.square().sum() for p in model.parameters())

    advise(model, pairs(), epochs=5, loss_fn=loss_fn, seconds=8)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad is None if gradient is None else torch.equal(p.grad, gradient)  # type: ignore[arg-type]


def test_regime_costs_and_savings_come_from_the_trials() -> None:
    found = advised()
    assert found.costs.random_time == pytest.approx(0.5, rel=0.01)
    assert found.costs.waiting < 0.01
    assert found.steps == 20 * 6
    assert found.seconds == pytest.approx(120 * 8, rel=0.01)
    assert found.saved == pytest.approx(60 * 8, rel=0.02)
    assert found.regime.low == min(found.fewer_passes.small, found.fewer_images.small)
    assert found.regime.high == max(found.fewer_passes.small, found.fewer_images.small)
    assert found.fewer_passes.passes is not None
    assert found.fewer_passes.passes < 20 == found.fewer_images.passes
    assert {cut.name for cut in found.cuts} >= {"0", "3"}


def test_no_evidence_gives_costs_alone_and_says_so() -> None:
    found = advised()
    assert found.recommendation.kind == "no evidence"
    text = str(found)
    assert "No evidence on methods" in text
    assert "Nothing is known about what is lost in accuracy" in text
    assert "points" not in text
    assert 'halfway.ForwardBlocker(model, None, prune_ratio=0.5, selector="random")' in text


def test_random_with_what_is_likely_lost_in_one_sentence_with_n_intervals_and_scale() -> None:
    found = advised(everywhere(1.0, "no"))
    assert found.recommendation.kind == "random"
    sentence = " ".join(str(found).split()).partition("Likely effect on accuracy")[2].partition("images).")[0]
    for part in ("reduced scale", "n = 5", "-1.50 [-2.00, -1.00] points to full data", "to fewer epochs at equal cost"):
        assert part in sentence


def test_beside_random_pruning_the_rule_that_follows_it_is_named_where_the_loop_can_feed_it() -> None:
    known = evidence(rung("a", 0.5, *controls(1.0), method("auto", (0.3, -0.1, 0.7), p=0.2)))
    text = " ".join(str(advised(known)).split())
    assert 'selector="auto" is worth a try' in text
    assert "+0.30 [-0.10, +0.70] to random pruning on a (n = 5)" in text
    more = evidence(rung("a", 0.5, *known.rungs[0].findings, method("auto", (0.2, -0.1, 0.5), p=0.2, n=13)))
    again = " ".join(str(advised(more)).split())
    assert "+0.20 [-0.10, +0.50] to random pruning on a (n = 13)" in again
    assert "+0.30" not in again  # the finding with most seeds, and no other
    assert 'selector="auto"' not in str(advised(everywhere(-1.0, "no")))  # fewer epochs
    numbers = [(x, torch.rand(len(x), 3)) for x, _ in pairs()]
    regression = advised(known, loader=numbers, loss_fn=lambda outputs, y: (outputs - y).square().mean(1))
    assert 'selector="auto"' not in str(regression)


@pytest.mark.parametrize(
    ("gain", "time", "named"), [(0.3, takes_time, True), (-0.3, takes_time, False), (0.3, takes_a_second, False)]
)
def test_beside_fewer_epochs_it_is_named_where_it_had_the_higher_mean_and_steps_get_shorter(
    gain: float, time: Any, named: bool
) -> None:
    known = evidence(rung("a", 0.5, *controls(-1.0), method("auto", (gain, gain - 0.4, gain + 0.4), p=0.2)))
    found = advised(known, time=time)
    assert found.recommendation.kind == "fewer epochs"
    assert ('selector="auto" is worth a try' in " ".join(str(found).split())) is named


def test_beside_fewer_epochs_it_is_not_named_if_it_was_behind_on_one_rung() -> None:
    rungs = [
        rung(name, 0.5, *controls(-1.0), method("auto", (gain, gain - 0.4, gain + 0.4), p=0.2))
        for name, gain in (("a", 0.3), ("b", -0.1))
    ]
    costs = Costs(0.5, random_time=0.55)
    assert words.on_auto(Recommendation("fewer epochs", "", tuple(rungs[:1])), costs, classes=True)
    assert not words.on_auto(Recommendation("fewer epochs", "", tuple(rungs)), costs, classes=True)


def test_fewer_epochs_instead() -> None:
    found = advised(everywhere(-1.0, "no"), epochs=31)
    assert str(found).startswith("Train for fewer epochs instead.")
    assert found.lines.startswith("epochs = 16  # instead of 31")


def test_a_method_with_the_lines_it_needs_and_where_it_lost() -> None:
    known = everywhere(-1.0, "last_loss_hard")
    worse = rung("wrong-labels", 0.5, *controls(1), method("last_loss_hard", (-3.0, -4.0, -2.0)), ladder="")
    found = advised(Evidence((*known.rungs, worse)))
    assert found.recommendation.kind == "method"
    assert 'selector="last_loss_hard"' in found.lines
    assert "blocker(x, y, ids=ids)" in found.lines
    assert "blocker.observe(losses)" in found.lines
    assert "The time that last_loss_hard takes to choose was not measured." in " ".join(str(found).split())
    assert "to choose" not in str(advised(everywhere(1.0, "no")))
    assert "it lost against the better control on wrong-labels: -3.00 [-4.00, -2.00] (n = 5)" in " ".join(
        str(found).split()
    )


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(label_smoothing=0.1), functools.partial(F.cross_entropy, label_smoothing=0.1)]
)
def test_label_smoothing_is_named_because_it_keeps_plain_losses_large(loss_fn: Any) -> None:
    assert "With label smoothing (0.1) fewer plain losses fall below 0.1" in " ".join(
        str(advised(loss_fn=loss_fn)).split()
    )
    assert "label smoothing" not in str(advised(loss_fn=nn.CrossEntropyLoss()))


class Endless:
    """A loader without a length."""

    def __iter__(self) -> Any:
        return iter(pairs())


def test_a_method_that_needs_ids_is_not_for_a_stream_and_none_is_for_targets_that_are_no_classes() -> None:
    known = everywhere(1.0, "last_loss_hard")
    assert advised(known).recommendation.kind == "method"
    assert advised(known, loader=Endless()).recommendation.kind == "random"
    loader = DataLoader(Unsized(), 8)
    assert advised(known, loader=loader).recommendation.kind == "random"
    numbers = [(x, y.float()) for x, y in pairs()]
    found = advised(known, loader=numbers, loss_fn=lambda out, y: (out[:, 0] - y) ** 2)
    assert found.recommendation.kind == "random"
    text = " ".join(str(found).split())
    assert "All evidence is on the classification of images" in text
    assert "depends on the unit of the targets" in text
    assert "the unit" not in str(advised(known))


def test_whole_numbers_to_regress_on_are_no_classes_and_a_single_logit_for_two_is() -> None:
    known = everywhere(1.0, "last_loss_hard")
    model = nn.Linear(4, 1)
    given: dict[str, Any] = {"epochs": 5, "seconds": 8, "evidence": known}
    counts = [(x, 20 * y) for x, y in pairs()]
    found = advise(model, counts, loss_fn=lambda out, y: (out.squeeze(1) - y).square(), **given)
    text = " ".join(str(found).split())
    assert "All evidence is on the classification of images" in text
    assert "depends on the unit of the targets" in text
    assert "classes are uneven" not in text

    def binary(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out.squeeze(1), y.float(), reduction="none")

    found = advise(model, pairs(classes=2), loss_fn=binary, **given)
    assert "All evidence is on" not in str(found)


def test_a_stream_is_loaded_whole_whatever_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowStream(Unsized):
        def __iter__(self) -> Any:
            for each in super().__iter__():
                Ticking.time += 40
                yield each

    found = advised(everywhere(1.0, "no"), loader=DataLoader(SlowStream(), 8), seconds=40000)
    assert found.costs.waiting > 0.9
    assert found.recommendation.kind == "fewer epochs"
    assert "PrunedBatchSampler" not in str(found)
    assert "the samples of a stream are read in any case" in " ".join(str(found).split())


class Unsized(IterableDataset):  # type: ignore[type-arg]
    """A stream that has a length, but no positions."""

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Any:
        return (each for x, y in pairs() for each in zip(x, y, strict=True))


def test_where_steps_get_no_shorter_only_fewer_epochs_save_time() -> None:
    found = advised(everywhere(1.0, "no"), time=takes_a_second)
    text = " ".join(str(found).split())
    assert text.startswith("Train for fewer epochs instead. A step that prunes 50% of its samples takes 1.00 of")
    assert found.lines.startswith("epochs = 10  # instead of 20")
    assert found.seconds is not None
    assert found.saved == pytest.approx(found.seconds / 2)
    assert "shorter at p = 0.5: -1.50 [-2.00, -1.00] points to full data" in text
    assert "Nothing is known about what is lost" in str(advised(time=takes_a_second))


def test_where_loading_takes_the_time_it_is_pruned_before_loading() -> None:
    class Slow(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                Ticking.time += 32
                yield batch

    found = advised(everywhere(1.0, "no"), loader=Slow(pairs()), seconds=4000)
    assert found.costs.waiting == pytest.approx(0.8, rel=0.02)
    assert found.recommendation.time == pytest.approx(0.5, rel=0.02)
    assert "halfway.PrunedBatchSampler(dataset, batch_size, 0.5, selector=" in found.lines
    assert "80% of the time was spent on waiting for data" in str(found)


def test_batches_in_half_precision_are_read_under_the_autocast_of_the_training() -> None:
    half = [(x.bfloat16(), y) for x, y in pairs()]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert advise(model, half, epochs=3, seconds=8, autocast=torch.bfloat16).at is not None


def test_a_last_batch_of_two_is_not_timed_where_half_of_it_would_be_one() -> None:
    ((x, y),) = pairs(batches=1)
    advised(loader=[(x, y), (x[:2], y[:2])])


def test_the_cut_that_is_timed_is_the_one_asked_for_or_a_usual_one() -> None:
    assert advised(at="3").at == "3"
    usual = advised()
    shares = {cut.name: cut.shallow_share for cut in usual.cuts}
    assert usual.at is not None
    assert shares[usual.at] == max([s for s in shares.values() if s <= 0.1], default=min(shares.values()))


def test_inputs_with_names_a_scalar_loss_and_progress() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, values: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"logits": self.second(torch.relu(self.first(values)) * scale)}

    loader = [({"values": x, "scale": torch.ones(len(x), 1)}, y) for x, y in pairs()]
    said: dict[str, float] = {}
    found = advise(
        Named(),
        loader,
        epochs=3,
        seconds=8,
        loss_fn=lambda out, y: F.cross_entropy(out["logits"], y, label_smoothing=0.1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        progress=lambda what, done: said.update({what: done}),
    )
    assert said == {"fewer passes": 1.0, "fewer images": 1.0, "timing steps": 1.0}
    assert found.fewer_passes.steps == 18


def test_the_evidence_of_the_package_is_used_without_another() -> None:
    found = advise(net(), pairs(), epochs=3, seconds=8)
    assert found.about
    assert "No optimizer was given" in str(found)
