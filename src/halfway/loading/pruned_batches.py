"""`PrunedBatchSampler`: the batches of a data loader, pruned before a sample is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from ..functional import retained_count
from ..ratios import PruneRatio, Ratios
from ..samplers.weights import Index
from ..schedule import Schedule, check_schedule
from ..seeds import seed_of
from ..selectors import Candidates, Selection, Selector
from ..selectors.base import aside
from ..settings import as_json, from_0, plain_settings, require_same_config
from ..state.ranks import Ranks
from ..stats import Counters, Stats
from .epoch import Epoch
from .feedback import Feedback
from .refusals import checked_source, checked_targets, needing_nothing, targets_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_STATE_VERSION = 1
_STATE = {"version", "config", "ranks", "rank", "epoch", "reports", "lag", "counters", "selector"}
# Which of the numbers that a seed is made of stand for: the order of an epoch, the draw of a batch.
_ORDER, _DRAW = 0, 1


class PrunedBatchSampler(Sampler[list[int]]):
    """Batches of which a part is pruned before anything is loaded.

        batches = halfway.PrunedBatchSampler(dataset, batch_size=128, prune_ratio=0.5, selector="last_loss")
        loader = DataLoader(halfway.WithIds(dataset), batch_sampler=batches, num_workers=8)
        for epoch in range(200):
            batches.set_epoch(epoch)
            for x, y, ids in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                batches.observe(ids, losses)            # only for selectors that learn from losses
                losses.mean().backward(); optimizer.step(); optimizer.zero_grad()

    The samples come in the order of `sampler`, `batch_size` of them are offered at a time, and exactly S of these are
    retained: as many optimizer steps as training on all samples, and pruned ones are not even decoded. It takes the
    selectors that need to see nothing but what they remember; for the others there is `ForwardBlocker`.

    The draw of batch k is a function of (seed, epoch, k) and of what was learned. A loader with W workers that each
    fetch f batches ahead draws f W batches before the first is trained on, so what is known at a draw is f W + 1
    batches old (`stats.lag`). Where a sample is offered once in an epoch that makes no difference, for what an epoch
    teaches is about samples that it has offered already. Where samples are drawn with replacement, or a selector learns
    from all samples at once, a run depends on the number of workers, unless `lag` is given.

    Args:
        sampler: any `Sampler`, such as a `DistributedSampler`; or a data set, which is then shuffled by (seed, epoch).
            Several processes that load data of their own need a `DistributedSampler`.
        batch_size: B, the samples that are offered at a time.
        prune_ratio: share of each batch to prune, in [0, 1), or what else `ForwardBlocker` takes.
        selector: a name or a `Selector` that needs nothing.
        schedule: when to prune; None: always. A schedule in steps counts batches.
        drop_last: leave out an incomplete last batch.
        targets: (N,) the classes of all samples of the data set, for selectors that look at classes.
        seed: of the order and of the selector's randomness. Global generators are not touched.
        lag: decide batch k by the reports of batches up to k - lag only, so that any number of workers gives the same
            run; at least f W + 1. None: by all that have arrived.
        process_group: of the ranks that train together; None: all of them.
        timeout: seconds to wait for the other ranks.

    Attributes:
        offered: B. (Not called batch_size, for the batches that come out are smaller.)
        last: the `Selection` of the batch last drawn; None if nothing was pruned. A loader draws ahead.
        stats: a `Stats` snapshot of the batches drawn so far.
    """

    last: Selection | None

    @plain_settings
    def __init__(
        self,
        sampler: Sampler[int] | Sized,
        batch_size: int,
        prune_ratio: PruneRatio,
        *,
        selector: str | Selector = "random",
        schedule: Schedule | None = None,
        drop_last: bool = False,
        targets: Any = None,
        seed: int = 0,
        lag: int | None = None,
        process_group: ProcessGroup | None = None,
        timeout: float = 300.0,
    ) -> None:
        check_schedule(schedule)
        if batch_size < 1:
            raise ValueError(
                f"batch_size, the samples that are offered at a time, must be at least 1, got {batch_size}"
            )
        if lag is not None and lag < 1:
            raise ValueError(f"lag must be at least 1, or None, got {lag}: no batch knows its own losses")
        self.offered = batch_size
        self.selector = needing_nothing(selector)
        self.schedule = schedule or Schedule()
        self._ratios = Ratios(prune_ratio, self.schedule)
        self.drop_last = drop_last
        self.seed = seed
        self.lag = lag
        self.last = None
        self._source = checked_source(sampler)
        self._targets = checked_targets(targets, self.selector, self._source)
        self._counters = Counters()
        self._feedback = Feedback(self.selector, lag)
        self._epoch: Epoch | None = None
        self._skip = 0
        self._finished = False  # all of the epoch's batches were handed out, and no epoch was set since
        self._loaded_untouched: int | None = None  # see load_state_dict
        as_json(self._config(), "PrunedBatchSampler")  # an error now rather than at the first checkpoint
        self._ranks = Ranks(process_group, timeout, "PrunedBatchSampler", "observe losses")
        self._ranks.agree(self._config())

    # ----------------------------------------------------------------- the loop

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Begin an epoch, or go on with it; call it before iterating. (Iterating over all batches and beginning again
        begins the next epoch without it.)

        Args:
            epoch: from 0 on.
            skip: batches of this epoch that were trained on before an interruption. What was decided then is handed
                out unchanged, the rest is decided now.
        """
        epoch, skip = from_0("epoch", epoch), from_0("skip", skip)
        if self._epoch is None or epoch != self._epoch.number:
            if skip and self._ranks.size > 1 and self._epoch is None and self._counters.steps:
                raise RuntimeError(
                    "this state was saved by another rank, which had other samples; to resume in the middle of an "
                    "epoch save and load the sampler's state on every rank, or begin an epoch anew"
                )
            self._begin(epoch)
        assert self._epoch is not None
        if skip > self._epoch.batches:
            raise ValueError(
                f"skip={skip} is more than the {self._epoch.batches} batches of this rank in epoch {epoch}"
            )
        self._skip = skip
        self._finished = False

    def __iter__(self) -> BatchIterator:
        self._feedback.check_watched()
        if self._epoch is None:
            self._begin(0)
        elif self._finished:
            self._begin(self._epoch.number + 1)
        self._finished = False
        return BatchIterator(self, self._skip)  # a loader with workers asks twice before it begins

    def __len__(self) -> int:
        """The batches that the next iteration will yield on this rank."""
        if self._epoch is not None and not self._finished:
            return self._epoch.batches - self._skip
        size = len(self._source)
        return size // self.offered if self.drop_last else -(-size // self.offered)

    def observe(self, ids: Tensor, losses: Tensor | None = None) -> None:
        """What a batch showed in training, once for each batch and in order. Nothing waits for the device, except
        with several ranks once the last batch of an epoch is drawn. All ranks must call it equally often; selectors
        that do not learn ignore it.

        Args:
            ids: (S,) whole numbers, the samples' positions in the data set.
            losses: (S,) one loss per sample, before weights; None where the selector learns from a watched layer only.
        """
        self._feedback.observe(ids, losses)
        if self._ranks.size > 1 and self._epoch is not None and self._epoch.drawn == self._epoch.batches:
            # No draw is left to learn before: here, where all ranks come by, and not when one of them saves.
            self._feedback.learn(self._candidates)

    def watch(self, model: nn.Module) -> None:
        """For a selector that learns from what enters a layer of the model (`balanced_remembered`): once, before the
        loop. What the layer was given in the last call of `model` goes with the next `observe(ids, ...)`."""
        self._feedback.watch(model)

    def weights(self, ids: Tensor) -> Tensor:
        """(S,) ids to (S,) float32 factors for their losses in this epoch, on the same device; 1 unless re-weighted.

        For loops without `halfway.samplers.WithWeights`, which brings them without a wait for the device.
        """
        if self._epoch is None:
            raise RuntimeError("nothing was drawn yet")
        return self._epoch.weights(ids.cpu()).to(ids.device)

    @property
    def stats(self) -> Stats:
        """What pruning has done in the batches drawn so far. May wait for the device; raises what went wrong there."""
        self.selector.check()
        doing = "" if self.last is None else self.selector.explanation()
        return Stats.of(self._counters, self.selector.diagnostics(), doing, lag=self._feedback.largest_lag)

    @property
    def prune_ratio(self) -> float:
        """Share of the next batch to prune, in [0, 1)."""
        return self._ratios.at(self._position)

    @property
    def _position(self) -> int:
        """Where the run is, in the schedule's unit."""
        if self.schedule.unit == "step":
            return self._counters.steps
        return 0 if self._epoch is None else self._epoch.number

    @property
    def sampler(self) -> PrunedBatchSampler:
        """Itself: trainers call `batch_sampler.sampler.set_epoch`."""
        return self

    # ------------------------------------------------------------- going on later

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later, also in the middle of an epoch: plain tensors and values, loads with
        `weights_only=True`. As a module's, its tensors are the live ones, and change as training goes on.

        It holds what this rank has drawn in this epoch. At the end of an epoch that of any rank will do.
        """
        if self.lag is None:
            self._feedback.learn(self._candidates)
        self.selector.check()
        return {
            "version": _STATE_VERSION,
            "config": as_json(self._config(), "PrunedBatchSampler"),
            "ranks": self._ranks.size,
            "rank": self._ranks.rank,
            "epoch": None if self._epoch is None else self._epoch.state_dict(),
            **self._feedback.state_dict(),
            "counters": self._counters.state_dict(),
            "selector": self.selector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; then call `set_epoch(epoch, skip=...)`. Another configuration is refused.

        Of two states that are loaded before the first draw the one that has drawn more counts: a `StatefulDataLoader`
        loads one of its own, which it took when a batch was drawn.
        """
        if not isinstance(state, dict) or set(state) != _STATE:
            raise ValueError(f"this is not the state_dict of a PrunedBatchSampler, which has {sorted(_STATE)}")
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"the state has version {state['version']}, this halfway reads {_STATE_VERSION}")
        require_same_config(state["config"], self._config(), "PrunedBatchSampler")
        Counters().load_state_dict(state["counters"])
        progress = int(state["counters"]["steps"])
        if self._loaded_untouched is not None and progress <= self._loaded_untouched:
            return
        epoch = None
        if state["epoch"] is not None:
            epoch = Epoch.from_state(state["epoch"], self.offered, self.drop_last)
            if state["rank"] != self._ranks.rank and not torch.equal(epoch.order, self._order(epoch.number)):
                epoch = None  # another rank's; a new epoch can begin, this one cannot go on
        self.selector.load_state_dict(state["selector"])
        self._counters.load_state_dict(state["counters"])
        self._feedback.load_state_dict(state)
        self._epoch, self._skip, self._finished, self.last = epoch, 0, False, None
        self._ranks.forget_senders()
        self._loaded_untouched = progress

    def close(self) -> None:
        """Let go of the watched model, and give the process group back."""
        self._feedback.close()
        self._ranks.close()

    # ---------------------------------------------------------------------------

    def draw(self, k: int) -> list[int]:
        """Batch k of this epoch: what was decided for it, or what is decided now. Called by the iterator."""
        assert self._epoch is not None
        while self._epoch.drawn <= k:
            self._decide(self._epoch)
        self._finished = k + 1 == self._epoch.batches
        return list(map(Index, *self._epoch.retained(k)))

    def _decide(self, epoch: Epoch) -> None:
        """Choose among the samples of the next batch."""
        self._loaded_untouched = None
        k, counters, selector = epoch.drawn, self._counters, self.selector
        self._feedback.learn(self._candidates, before=k)
        ids = epoch.batch(k)
        size = len(ids)
        position = self._position
        count = retained_count(size, self._ratios.at(position)) if self.schedule.active(position) else size
        generator = torch.Generator("cpu").manual_seed(seed_of(self.seed, epoch.number, k, _DRAW))
        candidates = self._candidates(ids, generator)
        with aside(generator.device):
            selection = selector.select(candidates, count) if count < size else None
            selector.learn(candidates, None if selection is None else selection.indices)
        if selection is None:
            epoch.decide(None, None)
        else:
            epoch.decide(selection.indices, selection.weights)
        self.last = selection
        counters.steps += 1
        counters.pruned_steps += count < size
        counters.seen += size
        counters.retained += count
        counters.spent += count

    def _candidates(self, ids: Tensor, generator: torch.Generator) -> Candidates:
        targets = None if self._targets is None else targets_of(self._targets, ids)
        return Candidates(len(ids), generator, ids=ids, targets=targets, ranks=self._ranks)

    def _begin(self, epoch: int) -> None:
        self._feedback.learn(self._candidates)
        self.selector.check()
        self._feedback.new_epoch()
        self._epoch = Epoch(epoch, self._order(epoch), self.offered, self.drop_last)
        self._skip, self._finished = 0, False

    def _order(self, epoch: int) -> Tensor:
        """(N,) the ids of an epoch, in order."""
        if not isinstance(self._source, Sampler):
            generator = torch.Generator("cpu").manual_seed(seed_of(self.seed, epoch, _ORDER))
            return torch.randperm(len(self._source), generator=generator, device="cpu")
        if callable(set_epoch := getattr(self._source, "set_epoch", None)):
            set_epoch(epoch)
        return torch.tensor([int(i) for i in self._source], dtype=torch.int64, device="cpu")

    def _config(self) -> dict[str, Any]:
        return {
            "batch_size": self.offered,
            "prune_ratio": self._ratios.config(),
            "drop_last": self.drop_last,
            "seed": self.seed,
            "lag": self.lag,
            "selector": self.selector.name,
            **{f"selector.{key}": value for key, value in self.selector.config().items()},
            **{f"schedule.{key}": value for key, value in vars(self.schedule).items()},
        }


class BatchIterator(Iterator[list[int]]):
    """One pass over the batches of an epoch. Its state is where it is; what was decided is the sampler's."""

    def __init__(self, batches: PrunedBatchSampler, k: int) -> None:
        assert batches._epoch is not None
        self._batches, self._epoch, self._k = batches, batches._epoch, k

    def __next__(self) -> list[int]:
        if self._batches._epoch is not self._epoch:
            raise RuntimeError(
                f"epoch {self._epoch.number} is iterated over after another one has begun; begin a new iteration after "
                "set_epoch"
            )
        if self._k >= self._epoch.batches:
            raise StopIteration
        batch = self._batches.draw(self._k)
        self._k += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch.number, "batch": self._k}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["epoch"] != self._epoch.number:
            self._batches.set_epoch(state["epoch"])
            assert self._batches._epoch is not None
            self._epoch = self._batches._epoch
        self._k = state["batch"]
