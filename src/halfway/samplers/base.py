"""What a sampler is: something that decides before the epoch which samples are trained on.

It is a plain `torch.utils.data.Sampler`, so pruned samples are not even loaded. A subclass decides (`decide`) and may
learn from the losses of the samples that were trained on (`learn`). Order, ranks, weights, resuming and counting are
done here, in the same way for all.

Shape suffixes: N samples of the data set, M retained, B of a batch. R ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .. import functional
from ..schedule import Schedule, check_schedule
from ..seeds import seed_of
from ..settings import as_json, from_0, plain_settings, recorded_settings, require_same_config, share
from ..state.ranks import Ranks
from ..state.sample_memory import SampleMemory
from .refusals import check_ids, check_observed, length_of
from .weights import Index

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_STATE_VERSION = 1
_STATE = {"version", "config", "epoch", "pruning", "retained", "weights", "memory", "counters"}
_COUNTERS = {"offered", "retained", "pruned_epochs", "fed"}


@dataclass(frozen=True)
class Decision:
    """The choice for one epoch.

    retained: (M,) int64, sorted: the ids of the samples that are trained on.
    weights: (M,) factors for their losses; None unless the method re-weights.
    """

    retained: Tensor
    weights: Tensor | None = None


class Common(TypedDict, total=False):
    """The options all samplers have; see `EpochSampler`."""

    schedule: Schedule | None
    seed: int
    process_group: ProcessGroup | None
    timeout: float
    shuffle: bool


_COMMON = tuple(Common.__annotations__)


class EpochSampler(Sampler[int]):
    """Base class. A subclass sets `name` and implements `decide`.

        sampler = halfway.samplers.InfoBatch(dataset, prune_ratio=0.5, schedule=halfway.Schedule(0, 175))
        loader = DataLoader(halfway.samplers.WithWeights(dataset), batch_size=128, sampler=sampler)
        for epoch in range(200):
            sampler.set_epoch(epoch)
            for x, y, ids, weights in loader:
                losses = F.cross_entropy(model(x), y, reduction="none")
                sampler.observe(ids, losses)
                (weights * losses).mean().backward(); optimizer.step(); optimizer.zero_grad()

    Order: one permutation of all samples per (seed, epoch), with the pruned ones left out, so that two methods with the
    same seed visit the samples they share in the same order. Of R ranks, rank r takes every R-th sample, starting with
    the r-th. The up to R - 1 samples left over at the end are skipped in this epoch, so that all ranks get equally
    many. Every rank makes the same decision.

    Args:
        data: the data set or N, its length.
        prune_ratio: p in [0, 1), the share of samples to prune; each method says what exactly that means.
        schedule: the epochs to prune in; None: all. In the others every sample is trained on, with weight 1.
        seed: of the order and of the method's randomness. Global generators are not touched.
        process_group: of the ranks that train together; None: all processes.
        timeout: seconds to wait for the other ranks.
        shuffle: False takes the samples in the order of their ids.

    Attributes:
        learns: whether it needs the losses that `observe` reports.
        learns_from: which losses to report: those of the training, or the "plain loss", cross-entropy without label
            smoothing.
        reweights: whether it gives the losses weights.
        num_samples: N.
        ranks: the processes that train together.
        memory: what is known about each sample; None for a method that remembers nothing.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    learns_from: ClassVar[Literal["training loss", "plain loss"]] = "training loss"
    reweights: ClassVar[bool] = False
    memory: SampleMemory | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = plain_settings(recorded_settings(cls.__init__))  # type: ignore[method-assign]

    @plain_settings
    def __init__(
        self,
        data: int | Sized,
        prune_ratio: float,
        *,
        schedule: Schedule | None = None,
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        timeout: float = 300.0,
        shuffle: bool = True,
    ) -> None:
        check_schedule(schedule)
        if schedule is not None and schedule.unit != "epoch":
            raise ValueError(
                f"a sampler decides before each epoch, but {schedule} counts steps; use Schedule(..., unit='epoch')"
            )
        self.num_samples = length_of(data)
        self.prune_ratio = share("prune_ratio", prune_ratio)
        self.schedule = schedule or Schedule()
        self.seed = seed
        self.shuffle = shuffle
        self.memory = None
        self._epoch: int | None = None
        self._pruning = False
        self._skip = 0
        self._retained_N = torch.ones(self.num_samples, dtype=torch.bool, device="cpu")
        self._weights_N = torch.ones(self.num_samples, device="cpu", dtype=torch.float32)
        self._weights_there: Tensor | None = None  # a copy on the device of the ids, made when needed
        self._counters = dict.fromkeys(sorted(_COUNTERS), 0)
        self._warned = False
        as_json(self._config(), "sampler")  # an error now rather than at the first checkpoint
        self.ranks = Ranks(process_group, timeout, type(self).__name__, "observe losses")
        self.ranks.agree(self._config())  # first: until then a rank may still be connecting to one that raises
        if self.retained_count < self.ranks.size:
            self.ranks.close()
            raise ValueError(
                f"{self.retained_count} of {self.num_samples} samples are retained, but there are {self.ranks.size} "
                "ranks; lower prune_ratio or use fewer ranks"
            )

    # ------------------------------------------------------- what a method does

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        """Choose the samples of an epoch. Called once for each epoch in which samples are pruned.

        `generator` is the epoch's randomness, on the CPU: a function of (seed, epoch), the same on all ranks.
        """
        raise NotImplementedError

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        """Learn from the losses (B,) float32, without graph, of the samples `ids` (B,), on all ranks."""

    def config(self) -> dict[str, Any]:
        """The method's own settings as plain values: the constructor's arguments without those that all samplers take.
        Called in this class's `__init__`."""
        settings: dict[str, Any] = vars(self).get("_settings", {})
        return {name: value for name, value in settings.items() if name not in ("data", "prune_ratio", *_COMMON)}

    def foresee(self, epochs: int) -> None:
        """Warn, once, if the method cannot work as described in a training of this many epochs."""

    @property
    def retained_count(self) -> int:
        """M = N - round(p N), at least 1: how many samples a method retains that prunes an exact number."""
        return functional.retained_count(self.num_samples, self.prune_ratio)

    def continues(self, epoch: int, period: int) -> bool:
        """For `decide`: whether `epoch` and the epoch before it lie in the same `period` of the pruning window."""
        if self._epoch is None or not self._pruning:
            return False
        start = self.schedule.start
        return (epoch - start) // period == (self._epoch - start) // period

    # ---------------------------------------------------------------- the loop

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Decide which samples are trained on in this epoch; call it before the epoch. A repeated call changes nothing.

        Args:
            epoch: from 0 on.
            skip: how many samples of this epoch this rank trained on before an interruption; iteration goes on with the
                rest of the same order. (After `skip` on each of R ranks the first R * `skip` of the order are used up.)
        """
        epoch, skip = from_0("epoch", epoch), from_0("skip", skip)
        if self.memory is not None:
            self.memory.check()
        if epoch != self._epoch:
            self._take(epoch)
        if skip > self._share:
            raise ValueError(
                f"skip={skip} is more than the {self._share} samples of this rank in epoch {epoch}; it counts samples, "
                "not batches, and those of one rank"
            )
        self._skip = skip

    def __iter__(self) -> Iterator[int]:
        """This rank's samples, as `Index` with a weight."""
        self._ensure_epoch()
        assert self._epoch is not None
        order = torch.arange(self.num_samples, device="cpu")
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(seed_of(self.seed, self._epoch))
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
        order = order[self._retained_N[order]]
        mine = order[: self._share * self.ranks.size][self.ranks.rank :: self.ranks.size][self._skip :]
        # All at once, so that a loader that prefetches cannot see the next epoch's decision.
        return map(Index, mine.tolist(), self._weights_N[mine].tolist())

    def __len__(self) -> int:
        """How many samples `__iter__` will yield on this rank, in this epoch."""
        self._ensure_epoch()
        return self._share - self._skip

    def observe(self, ids: Tensor, losses: Tensor) -> None:
        """The one line in the loop for a method that learns; others ignore it. All ranks must call it equally often and
        with equally many samples, as they do with loaders of the same batch size.

        Args:
            ids: (B,) whole numbers, the samples' positions in the data set.
            losses: (B,) the loss of each, before weights. A sample whose loss is not finite becomes unknown.
        """
        check_observed(ids, losses, self.num_samples)
        if self.learns:
            self._counters["fed"] = 1
            with torch.no_grad():
                self.learn(ids.to(torch.int64), losses.detach().to(torch.float32))

    def weights(self, ids: Tensor) -> Tensor:
        """(B,) float32 factors for the losses of `ids` (B,) in this epoch, on their device; 1 unless re-weighted.

        For loops without `WithWeights`. Nothing waits for the device.
        """
        self._ensure_epoch()
        check_ids(ids, self.num_samples)
        if self._weights_there is None or self._weights_there.device != ids.device:
            self._weights_there = self._weights_N.to(ids.device)
        return self._weights_there[ids]

    # ---------------------------------------------------------- what was decided

    @property
    def retained(self) -> Tensor:
        """(M,) int64, sorted: the ids that are trained on in this epoch, on all ranks together."""
        self._ensure_epoch()
        return self._retained_N.nonzero().squeeze(1)

    @property
    def last_ratio(self) -> float:
        """The share of samples that are pruned in this epoch."""
        self._ensure_epoch()
        return 1 - int(self._retained_N.sum()) / self.num_samples

    @property
    def effective_ratio(self) -> float:
        """The share of samples pruned in all epochs decided so far, including those outside the schedule."""
        offered = self._counters["offered"]
        return 1 - self._counters["retained"] / offered if offered else 0.0

    # ------------------------------------------------------------- going on later

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, even in the middle of an epoch: plain tensors and values, the same on all ranks,
        whose shapes never change. Loads with `weights_only=True`."""
        memory = {}
        if self.memory is not None:
            self.memory.check()
            memory = {key: value.clone() for key, value in self.memory.state_dict().items()}
        return {
            "version": _STATE_VERSION,
            "config": as_json(self._config(), "sampler"),
            "epoch": self._epoch,
            "pruning": self._pruning,
            "retained": self._retained_N.clone(),
            "weights": self._weights_N.clone(),
            "memory": memory,
            "counters": dict(self._counters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`; then call `set_epoch(epoch, skip=...)`. Raises if the settings differ."""
        kind = type(self).__name__
        if not isinstance(state, dict) or set(state) != _STATE:
            raise ValueError(f"this is not the state_dict of a sampler, which has {sorted(_STATE)}")
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"the state has version {state['version']}, this halfway reads {_STATE_VERSION}")
        require_same_config(state["config"], self._config(), "sampler")
        for key in ("retained", "weights"):
            if not isinstance(state[key], Tensor) or state[key].shape != (self.num_samples,):
                raise ValueError(f"the state's {key!r} of a {kind} must be a tensor of shape ({self.num_samples},)")
        if not isinstance(state["counters"], dict) or set(state["counters"]) != _COUNTERS:
            raise ValueError(f"the state's 'counters' of a {kind} must have {sorted(_COUNTERS)}")
        if self.memory is not None:
            self.memory.settle()
            self.memory.load_state_dict(state["memory"])
        self._epoch = state["epoch"]
        self._pruning = state["pruning"]
        self._retained_N = state["retained"].to("cpu", torch.bool, copy=True)
        self._weights_N = state["weights"].to("cpu", torch.float32, copy=True)
        self._weights_there = None
        self._counters = dict(state["counters"])
        self._skip = 0

    def close(self) -> None:
        """Destroy the process group."""
        self.ranks.close()

    # ---------------------------------------------------------------------------

    @property
    def _share(self) -> int:
        """The number of samples of one rank in this epoch."""
        return int(self._retained_N.sum()) // self.ranks.size

    def _take(self, epoch: int) -> None:
        """Decide, and make it the decision of the current epoch."""
        pruning = self.prune_ratio > 0 and self.schedule.active(epoch)
        decision = Decision(torch.arange(self.num_samples, device="cpu"))
        if pruning:
            self._warn_if_unfed()
            with torch.no_grad():
                decision = self.decide(epoch, torch.Generator("cpu").manual_seed(seed_of(self.seed, epoch, 1)))
            if len(decision.retained) < self.ranks.size:
                raise RuntimeError(
                    f"{type(self).__name__} retains {len(decision.retained)} of {self.num_samples} samples in epoch "
                    f"{epoch}, for {self.ranks.size} rank(s); lower prune_ratio"
                )
        self._retained_N = torch.zeros(self.num_samples, dtype=torch.bool, device="cpu")
        self._retained_N[decision.retained] = True
        self._weights_N = torch.ones(self.num_samples, device="cpu", dtype=torch.float32)
        if decision.weights is not None:
            self._weights_N[decision.retained] = decision.weights.to(torch.float32)
        self._weights_there = None
        self._epoch = epoch
        self._pruning = pruning
        self._counters["offered"] += self.num_samples
        self._counters["retained"] += len(decision.retained)
        self._counters["pruned_epochs"] += pruning

    def _warn_if_unfed(self) -> None:
        if not self.learns or self._warned or self._counters["fed"] or not self._counters["pruned_epochs"]:
            return
        self._warned = True
        warnings.warn(
            f"{type(self).__name__} learns from losses but got none in the last epoch; add "
            "`sampler.observe(ids, losses)` to the loop, with one loss per sample (reduction='none') and the ids that "
            "`halfway.WithIds` or `halfway.samplers.WithWeights` yields",
            stacklevel=4,
        )

    def _ensure_epoch(self) -> None:
        if self._epoch is None:
            raise RuntimeError("this epoch is not decided yet; call sampler.set_epoch(epoch) before each epoch")

    def _config(self) -> dict[str, Any]:
        return {
            "sampler": self.name,
            "num_samples": self.num_samples,
            "prune_ratio": self.prune_ratio,
            "seed": self.seed,
            "shuffle": self.shuffle,
            **{f"{self.name}.{key}": value for key, value in self.config().items()},
            **{f"schedule.{key}": value for key, value in vars(self.schedule).items()},
        }


def ids_of_highest(scores_N: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count,) sorted ids of the highest of (N,) scores. NaN (unknown) counts as highest; ties are broken at random."""
    ranked_N = scores_N.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf"))
    ids_N = torch.arange(len(scores_N), device="cpu")
    return functional.highest(ranked_N, ids_N, count, generator).sort().values
