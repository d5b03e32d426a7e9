"""The processes that train together, as the blocker sees them.

Every rank chooses among its own samples, but what the selector learns is summed over all ranks, in one small all-reduce
per step, so that its state is the same everywhere. The sum runs in a separate process group with its own time-out: a
rank that stops calling the blocker causes an error that names it, not a hang.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# After this many seconds of waiting a rank announces that it waits, so that the missing ranks can be named.
_PATIENCE = 2.0


class LostRank(RuntimeError):
    """Another process no longer takes part."""


class Sender(Protocol):
    """Something that one sum per step keeps the same on all ranks."""

    def send_nothing(self, ranks: Ranks) -> None:
        """Take part in the sum of a step although this rank has no batch."""


class PendingSum:
    """A sum over ranks that has been started."""

    def __init__(self, ranks: Ranks, value: Tensor, work: Any, occasion: str) -> None:
        self._ranks = ranks
        self._value = value
        self._work = work
        self._occasion = occasion

    def wait(self) -> Tensor:
        """The sum. Blocks the host for CPU tensors, the stream for others."""
        self._ranks.wait_for(self._work, self._occasion, on_host=self._value.device.type == "cpu")
        return self._value


class Ranks:
    """This process and its peers; alone, if torch.distributed is not in use.

    Args:
        process_group: of the processes that train one model together; None: all processes.
        timeout: seconds to wait for the others.
        owner: class name of the object that needs the ranks, for error messages.
        call: what every rank must do in each step, for the error about one that did not.

    Attributes:
        rank, size: in that group.
        group: the group that was passed.
        defer: whether to wait for sums only when they are needed. Required while ranks may run out of batches (`Join`):
            such a rank joins our sum only after it has joined DDP's backward pass.
    """

    def __init__(
        self,
        process_group: Any = None,
        timeout: float = 300.0,
        owner: str = "ForwardBlocker",
        call: str = "call the blocker",
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout, the seconds to wait for other ranks, must be positive, got {timeout}")
        self.rank, self.size, self.group = 0, 1, None
        self.timeout = timeout
        self.defer = False
        self._owner, self._call = owner, call
        self._own: Any = None
        self._sums = 0
        self._senders: dict[int, Sender] = {}
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.group = process_group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.size > 1:
            self._members = dist.get_process_group_ranks(self.group)
            self._connect()

    def agree(self, config: dict[str, Any]) -> None:
        """Raise, on every rank, if the ranks do not have the same settings."""
        if self.size == 1:
            return
        configs: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(configs, config, group=self._own)
        except RuntimeError as error:
            raise self._lost(f"make a {self._owner}") from error
        differences = [
            f"{key}: {configs[0].get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}"
            for rank, other in enumerate(configs)
            for key in sorted(configs[0].keys() | other.keys())
            if configs[0].get(key) != other.get(key)
        ]
        if differences:
            self.close()
            raise ValueError(
                f"the ranks have {self._owner}s of different configurations ({'; '.join(differences)}); "
                "make the same one everywhere"
            )

    def sum(self, value: Tensor, sender: Sender | None = None) -> PendingSum:
        """Start to sum `value` over all ranks, in place. All ranks must call this, in the same order.

        Args:
            value: this rank's part.
            sender: the object, if it sends a sum in every step; None for a sum that is sent once.
        """
        self._sums += 1
        if sender is not None:
            self._senders.setdefault(id(sender), sender)
        occasion = f"{self._call} (call {self._sums})"
        try:
            return PendingSum(self, value, dist.all_reduce(value, group=self._own, async_op=True), occasion)
        except RuntimeError as error:
            raise self._lost(occasion) from error

    def send_nothing(self) -> bool:
        """Called instead of a step on a rank that has no batches left, because the others wait for its part of the
        sums: every sender sends an empty part, in the order in which the senders first sent.

        Returns:
            whether there is any sender.
        """
        for sender in self._senders.values():
            sender.send_nothing(self)
        return bool(self._senders)

    def forget_senders(self) -> None:
        """Call this when a state was loaded: it may have replaced the objects that sent before."""
        self._senders.clear()

    def wait_for(self, work: Any, occasion: str, on_host: bool) -> None:
        """Wait for a collective. Where the host waits, the error names the ranks that do not come. On CUDA the host
        does not wait, and NCCL's watchdog keeps the time."""
        try:
            if on_host and not self._comes(work, min(_PATIENCE, self.timeout / 2)):
                self._announce(occasion)
            work.wait()
        except RuntimeError as error:
            raise self._lost(occasion) from error

    def close(self) -> None:
        """Destroy the process group."""
        own, self._own = self._own, None
        if own is not None and dist.is_initialized():
            dist.destroy_process_group(own)

    def _connect(self) -> None:
        try:
            self._own = dist.new_group(
                self._members,
                timeout=datetime.timedelta(seconds=self.timeout),
                use_local_synchronization=True,
                group_desc="halfway",
            )
        except RuntimeError as error:
            raise self._lost(f"make a {self._owner}") from error

    def _comes(self, work: Any, seconds: float) -> bool:
        try:
            work.wait(datetime.timedelta(seconds=seconds))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def _announce(self, occasion: str) -> None:
        self._store().set(self._key(self.rank, occasion), "waiting")

    def _lost(self, occasion: str) -> LostRank:
        """The error that names the ranks that have not announced that they wait."""
        missing = list(range(self.size))
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(RuntimeError):  # the store dies with the process that keeps it
            self._announce(occasion)
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store().check([self._key(rank, occasion)])]
                time.sleep(0.05)
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        return LostRank(
            f"{who if missing else 'another rank'} of {self.size} did not {occasion} within {self.timeout:g} s, or has "
            "died (its own output says why). If it ran out of batches, wrap the loop in "
            "torch.distributed.algorithms.join.Join([ddp, blocker]) or drop the last incomplete batches; if it is only "
            f"slow, pass {self._owner}(..., timeout=...) more seconds"
        )

    def _key(self, rank: int, occasion: str) -> str:
        return f"halfway/{self._members}/{occasion}/{rank}"

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()


class _Alone(Ranks):
    def __init__(self) -> None:
        self.rank, self.size, self.group, self.defer = 0, 1, None, False
        self._senders = {}


ALONE = _Alone()
