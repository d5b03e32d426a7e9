"""What a batch sampler learns from training, how old it is at a draw, and that a run can be stopped and resumed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
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
from halfway.state.host_copy import HostCopy

N, B = 96, 16


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 6, generator=generator), torch.arange(N) % 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


class Repeating(Sampler):
    """Draws with replacement, so that what an earlier batch of the same epoch has shown matters."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self):
        return iter(torch.randint(N // 3, (N,), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Run:
    """A training that notes which samples each step had."""

    def __init__(self, selector="last_loss", loader=DataLoader, workers: int = 0, source=None, **options) -> None:
        self.batches = halfway.PrunedBatchSampler(source or data(), B, 0.5, selector=selector, **options)
        extra = {"num_workers": workers, **({"prefetch_factor": 2} if workers else {})}
        self.loader = loader(halfway.WithIds(data()), batch_sampler=self.batches, **extra)
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.steps: list[list[int]] = []
        if isinstance(self.batches.selector, BalancedRemembered):
            self.batches.watch(self.model)

    def epoch(self, epoch: int | None, skip: int = 0, stop: int | None = None) -> None:
        if epoch is not None:
            self.batches.set_epoch(epoch, skip=skip)
        for done, (x, y, ids) in enumerate(self.loader, start=skip + 1):
            self.steps.append(ids.tolist())
            losses = F.cross_entropy(self.model(x), y, reduction="none")
            self.batches.observe(ids, losses)
            losses.mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if done == stop:
                return

    def state(self) -> dict:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "batches": self.batches.state_dict(), "loader": self._loader_state()}
        )

    def _loader_state(self) -> dict:
        return self.loader.state_dict() if isinstance(self.loader, StatefulDataLoader) else {}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.batches.load_state_dict(state["batches"])
        if isinstance(self.loader, StatefulDataLoader):
            self.loader.load_state_dict(state["loader"])


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


def test_the_largest_lag_is_that_of_reports_and_travels() -> None:
    run = Run(workers=1)
    list(run.loader)
    assert run.batches.stats.lag == 0, "nothing was ever reported"
    with pytest.warns(UserWarning, match="got none in the last epoch"):
        run.epoch(1)
    other = Run(workers=1)
    other.batches.load_state_dict(run.batches.state_dict())
    assert other.batches.stats.lag == run.batches.stats.lag > 0


def test_outside_the_schedule_nothing_is_explained() -> None:
    run = Run("auto", schedule=halfway.Schedule(0, 1), targets=data().tensors[1])
    run.epoch(0)
    assert "draws at random" in run.batches.stats.explanation
    run.epoch(1)
    assert run.batches.stats.explanation == ""


def test_a_report_is_read_back_in_the_next_epoch_and_not_while_training_computes_it(monkeypatch) -> None:
    """Workers draw ahead, so that most reports of a short epoch come when it is drawn."""
    run, read = Run(workers=2), []
    value = HostCopy.value
    monkeypatch.setattr(HostCopy, "value", lambda copied: (read.append(copied), value(copied))[1])
    observe = run.batches.observe

    def observed(ids: Tensor, losses: Tensor) -> None:
        before = len(read)
        observe(ids, losses)
        assert len(read) == before

    monkeypatch.setattr(run.batches, "observe", observed)
    run.epoch(0)
    run.epoch(1)
    assert len(read) >= N // B


def test_the_warning_of_missing_losses_comes_again_after_another_state_was_loaded() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    state = copy.deepcopy(batches.state_dict())
    for _ in range(2):
        batches.set_epoch(0)
        list(batches)
        with pytest.warns(UserWarning, match="got none in the last epoch"):
            batches.set_epoch(1)
        batches.load_state_dict(state)


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


def test_losses_that_never_come_are_warned_about() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    list(batches)
    with pytest.warns(UserWarning, match=r"call batches\.observe\(ids, losses\)"):
        list(batches)
    list(batches)  # once


def test_losses_that_came_before_a_run_was_resumed_are_not_missed() -> None:
    first = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    first.set_epoch(0)
    for batch in first:
        first.observe(torch.tensor(batch), torch.ones(len(batch)))
    states = [copy.deepcopy(first.state_dict())]
    first.set_epoch(1)  # where nothing has been reported yet
    states.append(first.state_dict())
    for state, epoch in zip(states, (1, 2), strict=True):
        second = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
        second.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second.set_epoch(epoch)


def test_what_a_selector_does_is_explained_of_its_own_choices_alone() -> None:
    first = halfway.PrunedBatchSampler(data(), B, 0.5, selector="auto", targets=data().tensors[1])
    for batch in first:
        first.observe(torch.tensor(batch), torch.ones(len(batch)))
    assert first.stats.explanation.startswith("draws ")
    first.load_state_dict(copy.deepcopy(first.state_dict()))
    assert first.stats.explanation == ""


def test_narrow_ids_reach_a_memory_that_is_larger_than_their_type() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    for end in (20_000, 30_000, 32_767):  # the memory grows by doubling, beyond what 16 bits hold
        batches.observe(torch.tensor([1, end - 1], dtype=torch.int16), torch.ones(2))
    assert batches.state_dict()["selector"]["losses"].isfinite().sum() == 4


def test_a_selector_that_learns_from_the_model_must_be_shown_it() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="balanced_remembered")
    with pytest.raises(RuntimeError, match=r"batches\.watch\(model\)"):
        next(iter(batches))


def test_what_is_remembered_is_what_entered_the_last_layer() -> None:
    model = net()
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector=BalancedRemembered(dim=32, use_loss=False))
    batches.watch(model)
    batches.set_epoch(0)
    x, _y = data().tensors
    for batch in list(batches):
        model(x[batch])
        batches.observe(torch.tensor(batch))
        with torch.no_grad():
            model(x[:2])  # an evaluation in between is not meant
    found = batches.state_dict()["selector"]["features"]
    seen = ~found[:, 0].isnan()
    assert seen.sum() == N // 2
    torch.testing.assert_close(found[seen, :12], model[:2](x)[seen[:N]].detach())


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


def test_a_report_of_other_samples_than_the_model_saw_is_an_error() -> None:
    model = net()
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="balanced_remembered")
    batches.watch(model)
    batches.set_epoch(0)
    ids = torch.tensor(next(iter(batches)))
    with pytest.raises(RuntimeError, match="was not called in training mode"):
        batches.observe(ids, torch.ones(len(ids)))
    model(torch.randn(3, 6))
    with pytest.raises(ValueError, match="last called on 3 samples"):
        batches.observe(ids, torch.ones(len(ids)))


@pytest.mark.parametrize(
    ("ids", "losses", "message"),
    [
        (torch.zeros(3), torch.ones(3), "whole numbers"),
        ([1, 2], torch.ones(2), "whole numbers"),
        (torch.arange(3), torch.ones(2), "one loss per sample|shape"),
        (torch.arange(3), None, "learns from losses"),
    ],
)
def test_a_report_that_makes_no_sense_is_an_error(ids, losses: Tensor | None, message: str) -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    with pytest.raises(ValueError, match=message):
        batches.observe(ids, losses)


def test_losses_that_are_not_finite_are_raised_with_the_next_epoch() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    batches.set_epoch(0)
    list(batches)
    batches.observe(torch.arange(4), torch.tensor([1.0, float("nan"), 2.0, 3.0]))
    with pytest.raises(FloatingPointError, match="not finite"):
        batches.set_epoch(1)


def test_a_lag_holds_back_what_a_watched_layer_showed() -> None:
    model = net()
    selector = BalancedRemembered(dim=32, use_loss=False)
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector=selector, lag=2)
    batches.watch(model)
    x = data().tensors[0]
    known = []
    for batch in batches:
        known.append(int((~selector.state_dict()["features"][:, :1].isnan()).sum()))
        model(x[batch])
        batches.observe(torch.tensor(batch))
    assert known == [0, 0, 8, 16, 24, 32], "batch k knows the batches up to k - 2"
    assert batches.stats.lag == 1


def test_a_watched_model_can_be_saved_whole_and_let_go(tmp_path) -> None:
    model = net()
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="balanced_remembered")
    batches.watch(model)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    x = data().tensors[0]
    assert torch.equal(again(x), model(x))
    batches.close()
    assert vars(model[-1]).keys() == vars(net()[-1]).keys()
