"""`PrunedBatchSampler`: the batches of a data loader, pruned before a sample is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from ..engine.interception import Interception
from ..functional import retained_count
from ..modules import unwrap
from ..ratios import PruneRatio, Ratios
from ..samplers.weights import Index
from ..schedule import Schedule, check_schedule
from ..seeds import seed_of
from ..selectors import Candidates, Selection, Selector
from ..selectors.base import aside
from ..selectors.tools.losses import per_sample
from ..settings import as_json, from_0, plain_settings, require_same_config
from ..state.ranks import Ranks
from ..stats import Counters, Stats
from .epoch import Epoch
from .refusals import checked_source, checked_targets, needing_nothing, targets_of
from .reports import Report, Reports

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
        self._reports = Reports()
        self._epoch: Epoch | None = None
        self._skip = 0
        self._finished = False  # all of the epoch's batches were handed out, and no epoch was set since
        self._largest_lag = 0
        self._loaded_untouched: int | None = None  # see load_state_dict
        self._entered: list[Tensor] = []
        self._watching: Interception | None = None
        self._observed = self._warned = False
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
        self._check_watched()
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
        """What a batch showed in training, once for each batch and in order. Nothing waits for the device. All ranks
        must call it equally often; selectors that do not learn ignore it.

        Args:
            ids: (S,) whole numbers, the samples' positions in the data set.
            losses: (S,) one loss per sample, before weights; None where the selector learns from a watched layer only.
        """
        if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            found = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ValueError(f"ids must be a tensor of whole numbers, one per sample, shape (S,), got {found}")
        if losses is not None:
            per_sample(losses, len(ids), "batches.observe(ids, losses)")
        elif self.selector.wants_losses == "required":
            raise ValueError(f"the selector {self.selector.name!r} learns from losses: batches.observe(ids, losses)")
        watched = self._entered.pop() if self._entered else None
        if self._watching is not None and watched is None:
            raise RuntimeError(
                "the watched model was not called in training mode since the last batches.observe: call it after the "
                "model, once for each batch"
            )
        if watched is not None and len(watched) != len(ids):
            raise ValueError(f"the model was last called on {len(watched)} samples, but these are {len(ids)} ids")
        self._observed = True
        if self._takes_reports:
            self._reports.add(Report(ids, None if losses is None else losses.float(), watched))
            if self._epoch is not None and self._reports.arrived == self._epoch.batches:
                self._learn(None)  # here, where all ranks come by, and not when one of them saves

    def watch(self, model: nn.Module) -> None:
        """For a selector that learns from what enters a layer of the model (`balanced_remembered`): once, before the
        loop. What the layer was given in the last call of `model` goes with the next `observe(ids, ...)`."""
        root, compiled = unwrap(model)
        watched = self.selector.watches(root)
        if watched is None:
            raise ValueError(f"the selector {self.selector.name!r} does not learn from the model: nothing to watch")
        if compiled:
            raise TypeError(
                f"the selector {self.selector.name!r} watches a layer, which a compiled model does not show; compile "
                "other parts of the model only, or choose another selector"
            )
        if self._watching is not None:
            raise RuntimeError("a model is being watched already")
        entered = self._entered

        def entering(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if root.training and torch.is_grad_enabled() and args:
                entered[:] = [args[0].detach()]
            return original(*args, **kwargs)

        self._watching = Interception(watched, "_call_impl", entering)

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
        return Stats.of(self._counters, self.selector.diagnostics(), doing, lag=self._largest_lag)

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
            self._learn(None)
        self.selector.check()
        return {
            "version": _STATE_VERSION,
            "config": as_json(self._config(), "PrunedBatchSampler"),
            "ranks": self._ranks.size,
            "rank": self._ranks.rank,
            "epoch": None if self._epoch is None else self._epoch.state_dict(),
            "reports": self._reports.state_dict(),
            "lag": self._largest_lag,
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
        self._reports.load_state_dict(state["reports"])
        self._largest_lag = int(state["lag"])
        self._epoch, self._skip, self._finished, self.last = epoch, 0, False, None
        self._observed = self._reports.arrived > 0
        self._ranks.forget_senders()
        self._loaded_untouched = progress

    def close(self) -> None:
        """Let go of the watched model, and give the process group back."""
        if self._watching is not None:
            self._watching.remove()
            self._watching = None
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
        self._learn(k)
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

    def _learn(self, k: int | None) -> None:
        """Before batch k is drawn: from the reports that it may know; None: from all that have arrived."""
        until = None
        if k is not None and self._takes_reports:
            behind = k + 1 - self._reports.arrived
            if self.lag is not None:
                until = max(0, k + 1 - self.lag)
                if self._reports.arrived < until:
                    raise RuntimeError(
                        f"lag={self.lag}, but batch {k} is drawn when {self._reports.arrived} batches of this epoch "
                        f"have been observed; pass lag={behind} at least (num_workers * prefetch_factor + 1 of a plain "
                        "DataLoader), and call batches.observe once for each batch"
                    )
            self._largest_lag = max(self._largest_lag, min(behind if self._observed else 0, k + 1))
        for report in self._reports.take(until):
            candidates = self._candidates(report.ids.to(torch.int64), None)
            with aside(candidates.generator.device):
                if report.watched is not None:
                    self.selector.note(candidates, None, report.watched)
                if report.losses is not None:
                    self.selector.observe(candidates, None, report.losses)

    @property
    def _takes_reports(self) -> bool:
        """Whether the selector learns from what training shows."""
        return self.selector.wants_losses != "no" or self._watching is not None

    def _candidates(self, ids: Tensor, generator: torch.Generator | None) -> Candidates:
        targets = None if self._targets is None else targets_of(self._targets, ids)
        generator = generator or torch.Generator("cpu")
        return Candidates(len(ids), generator, ids=ids, targets=targets, ranks=self._ranks)

    def _begin(self, epoch: int) -> None:
        self._learn(None)
        self.selector.check()
        self._warn_if_unfed()
        self._reports.new_epoch()
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

    def _warn_if_unfed(self) -> None:
        if self.selector.wants_losses == "required" and self._counters.steps and not (self._observed or self._warned):
            self._warned = True
            warnings.warn(
                f"the selector {self.selector.name!r} learns from losses, but got none in the last epoch: call "
                "batches.observe(ids, losses) after the loss, with one loss per sample. Without it the draw is random",
                stacklevel=4,
            )

    def _check_watched(self) -> None:
        if type(self.selector).watches is not Selector.watches and self._watching is None:
            raise RuntimeError(
                f"the selector {self.selector.name!r} learns from the model: call batches.watch(model) before the "
                "loop, and batches.observe(ids, losses) in it"
            )

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
