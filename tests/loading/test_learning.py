"""What a batch sampler learns from training, how old it is at a draw, and that a run can be stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

import halfway
from halfway.selectors import (
    Auto,
    BalancedProportional,
    BalancedRemembered,
    LastLossHard,
    LastLossProportional,
    OrderDP,
    RhoRemembered,
    Selector,
)
from tests.helpers.loaded import B, N, Repeating, Run, data, net


def test_the_hardest_by_the_last_known_losses_stay() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector=LastLossHard())
    losses = torch.randperm(N, generator=torch.Generator().manual_seed(5)).float()
    batches.set_epoch(0)
    list(batches)
    batches.observe(torch.arange(N), losses)
    batches.set_epoch(1)
    offered = halfway.PrunedBatchSampler(data(), B, 0.0)
    offered.set_epoch(1)
    for batch, whole in zip(batches, offered, strict=True):
        ids = torch.tensor(whole)
        hardest = ids[losses[ids].argsort(descending=True)[: B // 2]]
        assert set(batch) == set(hardest.tolist())


def test_rotation_uses_every_sample_before_any_is_used_again() -> None:
    batches = halfway.PrunedBatchSampler(range(B), B, 0.5, selector="rotate")
    used = torch.zeros(B)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for batch in batches:
            used[batch] += 1
    assert (used == 1).all()


@pytest.mark.parametrize(("workers", "lag"), [(0, 1), (1, 3), (2, 5)])
def test_stats_say_how_many_batches_old_the_memory_is(workers: int, lag: int) -> None:
    """Workers times what each fetches ahead, and one."""
    run = Run(workers=workers)
    for epoch in range(2):
        run.epoch(epoch)
    assert run.batches.stats.lag == lag


def trained(epochs: int, **options) -> Run:
    run = Run(**options)
    for epoch in range(epochs):
        run.epoch(epoch)
    return run


def test_where_samples_come_once_an_epoch_the_number_of_workers_makes_no_difference() -> None:
    """What is learned within an epoch is about samples that were offered already."""
    assert trained(3, workers=0).steps == trained(3, workers=2).steps


def test_with_a_lag_it_makes_none_where_samples_come_again_either() -> None:
    runs = [trained(3, workers=workers, lag=5, source=Repeating()) for workers in (0, 1, 2)]
    assert runs[0].steps == runs[1].steps == runs[2].steps
    for other in runs[1:]:
        for a, b in zip(runs[0].model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
    assert trained(3, workers=0, source=Repeating()).steps != trained(3, workers=2, source=Repeating()).steps


def test_a_lag_that_the_loader_exceeds_is_an_error_that_says_which_one_would_do() -> None:
    run = Run(workers=2, lag=4)
    with pytest.raises(RuntimeError, match="pass lag=5 at least"):
        run.epoch(0)
    Run(workers=2, lag=5).epoch(0)


@pytest.mark.parametrize(
    ("selector", "workers", "lag"),
    [("last_loss", 0, None), ("last_loss", 2, 5), ("rotate", 0, 5), ("balanced_remembered", 2, None), ("random", 2, 5)],
)
def test_stopped_in_the_middle_of_an_epoch_and_resumed_it_is_the_same_run(selector, workers, lag) -> None:
    assert_same_when_resumed(lambda: Run(selector, workers=workers, lag=lag, source=Repeating()))


def assert_same_when_resumed(make: Callable[[], Run]) -> Run:
    """Stopped after two batches of the third epoch. Returns the run that was not."""
    whole = make()
    for epoch in range(4):
        whole.epoch(epoch)
    first = make()
    first.epoch(0)
    first.epoch(1)
    first.epoch(2, stop=2)
    second = make()
    second.load(first.state())
    second.epoch(2, skip=2)
    second.epoch(3)
    assert first.steps + second.steps == whole.steps
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.batches.stats == whole.batches.stats
    return whole


PROPORTIONAL = {"cap": "chance", "num_classes": 3, "scale": "bounded"}
MAKERS: dict[str, Callable[[], Selector]] = {
    "last_loss_proportional": lambda: LastLossProportional(**PROPORTIONAL),
    "balanced_proportional": lambda: BalancedProportional(**PROPORTIONAL),
    "order_dp": OrderDP,
    "auto": lambda: Auto(learned=0.1),
    "rho_remembered": lambda: RhoRemembered(torch.linspace(0, 1, N)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_selector_that_remembers_losses_decides_before_loading(name: str) -> None:
    targets = data().tensors[1]
    run = assert_same_when_resumed(lambda: Run(MAKERS[name](), targets=targets))
    assert run.batches.stats.effective_ratio == 0.5
    assert all(len(set(ids)) == B // 2 for ids in run.steps)
    known = run.batches.state_dict()["selector"]["losses"][:N].isfinite().squeeze(1).nonzero().squeeze(1)
    assert set(known.tolist()) == {i for ids in run.steps for i in ids}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_where_it_was(workers: int) -> None:
    options = {"loader": StatefulDataLoader, "workers": workers, "source": Repeating()}
    whole = trained(4, **options)

    first = Run(**options)
    first.epoch(0)
    first.epoch(1)
    first.epoch(2, stop=2)
    second = Run(**options)
    second.load(first.state())
    second.epoch(None)  # the loader itself knows where it was
    second.epoch(3)
    assert first.steps + second.steps == whole.steps
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_an_iterator_is_where_it_is_and_nothing_else() -> None:
    run = Run()
    run.batches.set_epoch(3)
    iterator = iter(run.batches)
    next(iterator)
    next(iterator)
    assert iterator.state_dict() == {"epoch": 3, "batch": 2}


def test_what_is_learned_and_drawn_does_not_depend_on_autocast_around_the_loop() -> None:
    def steps(enabled: bool) -> tuple[list[list[int]], Tensor]:
        batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector=BalancedRemembered(dim=4))
        model = net()
        batches.watch(model)
        drawn = []
        x = data().tensors[0]
        for epoch in range(3):
            batches.set_epoch(epoch)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                for batch in batches:
                    drawn.append([int(i) for i in batch])
                    with torch.autocast("cpu", enabled=False):
                        losses = F.cross_entropy(model(x[batch]), data().tensors[1][batch], reduction="none")
                    batches.observe(torch.tensor(batch), losses)
        return drawn, batches.state_dict()["selector"]["features"]

    drawn, features = steps(False)
    drawn_within, features_within = steps(True)
    assert drawn_within == drawn
    assert torch.equal(features_within.nan_to_num(), features.nan_to_num())
