"""The training loop of the recipes.

What is worth knowing:

- Initial weights are a function of the seed; batches and their augmentation are a function of (seed, epoch, step). So
  two methods at the same seed differ only in what they prune.
- Nothing waits for the device inside a round (an epoch, or `log_every` steps), except to redraw the progress bar.
- A checkpoint holds everything: weights, optimizer, policy, scaler, blocker, counts, random generators. A training that
  was killed at any moment and resumed ends with the same bits (on a GPU: if its kernels are deterministic).
- `method="full"` and a ratio of 0 run without a blocker: the plain loop.
- The seed of what a method draws is `selection_seed`: initial weights, batches and their order do not depend on it.
- Where a sampler decides before the epoch, an epoch has fewer steps. Time is still counted in steps of full data: each
  of an epoch's n batches stands for 1/n of it, for the learning rate, rounds, windows and lengths alike.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...advice.trial import SMALL_LOSS
from ...seeds import seed_of
from ..data import Data
from ..progress import Bar
from ..recipes import controls
from ..recipes.schema import Recipe
from . import building, optim, recorders, tasks
from .evaluation import Evaluation
from .irreducible import Scoring
from .logs import Logs
from .order import BatchOrder
from .rank import rank_and_size
from .retention import Retention
from .round import Round
from .run_folder import VERSION, RunFolder
from .trainable import check_trainable


class Training:
    """One run of a recipe.

    Args:
        recipe: what to train.
        data: its data, already on the device if they stay in memory.
        device: where to train.
        folder: an opened run folder; None: nothing is written (benchmarks, tests).
        show: draw a progress bar.
    """

    def __init__(
        self, recipe: Recipe, data: Data, device: torch.device, folder: RunFolder | None = None, show: bool = True
    ) -> None:
        self.recipe, self.data, self.device, self.folder = recipe, data, device, folder
        self.rank, self.ranks = rank_and_size()
        self.show = show and self.rank == 0
        check_trainable(recipe, self.ranks)
        self.task = tasks.make(recipe)
        whole = BatchOrder(len(data.train), recipe.batch_size, recipe.seed, self.rank, self.ranks)
        self.order = whole.of_size(controls.batch_size(recipe, self.ranks))
        self.model, self.wrapped = building.network(recipe, data, device, self.ranks)
        settings = controls.optimizer(recipe, self.ranks)
        self.optimizer = optim.make_optimizer(settings, self.model)
        per_unit = whole.per_epoch if recipe.unit == "epoch" else 1
        self.full_steps = recipe.length * per_unit
        planned = controls.steps(recipe, self.full_steps)
        self.steps = max(1, round(recipe.stop_after * planned))
        self.round_steps = recipe.log_every * per_unit
        warmup = round((recipe.learning_rate.warmup or 0) * per_unit * planned / self.full_steps)
        self.policy = optim.make_policy(recipe.learning_rate, self.optimizer, settings.lr, planned, warmup)
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "amp" and device.type == "cuda")
        self.blocker = building.blocker(recipe, data, self.wrapped, self.task)
        self.sampler = recipe.sampler(len(data.train), self.order.per_epoch, data)
        # Where a subset is trained on for as many steps as all data, its epochs are as short as it is.
        self.epoch_steps = self.order.per_epoch
        if recipe.repeats and self.sampler is not None:
            self.epoch_steps = max(1, self.sampler.retained_count // self.order.batch_size)
        self.recorder = recorders.make(recipe, len(data.train))
        self.retention = Retention(data.train, device)
        self.evaluation = Evaluation(recipe, data, self.task, device)
        self.scoring = None if data.held_out is None else Scoring(recipe, data.held_out, device, folder)
        self.step = 0
        # With a sampler: batches trained on, and steps of full data in epochs that were pruned.
        self._batches = self._pruned_steps = 0
        self._pruning = self.order.batch_size < recipe.batch_size
        self._round = self._new_round()

    # ------------------------------------------------------------------ set-up

    @property
    def name(self) -> str:
        """For the progress bar."""
        r = self.recipe
        return f"{r.name} {r.method} {r.ratios}" if r.prunes else r.name

    # ------------------------------------------------------------------- loop

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until `stop()`. Resumes where the folder's checkpoint left off.

        Returns:
            whether the training is finished.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            random = self._resume()
            if random is None:
                torch.manual_seed(seed_of(self.recipe.seed, self.rank))
            else:
                _set_random(random, self.device)
            folder = self.folder if self.rank == 0 else None
            with Logs(folder, self.step) as logs, Bar(self.steps, self.name, "step", self.show, done=self.step) as bar:
                if random is None:
                    self._save(logs)
                while self.step < self.steps:
                    if not self.train_epoch(logs, bar, stop):
                        return False
        return True

    def train_epoch(self, logs: Logs, bar: Bar, stop: Callable[[], bool] = lambda: False) -> bool:
        """The rest of the current epoch; False if it was stopped."""
        epoch = self.step // self.epoch_steps
        if self.blocker is not None:
            self.blocker.set_epoch(epoch)
        self.model.train()
        begin = time.perf_counter()
        plan, ends = self._plan(epoch)
        batches = iter(self.data.train.batches(plan))
        for end in ends:
            asked = time.perf_counter()
            x, y, ids = next(batches)
            arrived = time.perf_counter()
            if self.recorder is not None:
                self.recorder.begin_step(self)
            loss = self.train_step(x, y, ids)
            before, ended = self.step, self._advance(end)
            self._round.add(loss, time.perf_counter() - begin, arrived - asked)
            bar.update(self.step - before)
            if bar.due:
                bar.figures(**self._figures(loss, epoch))
            if ended:
                self._end_round(logs)
            elif stop():
                self._save(logs)
                return False
            begin = time.perf_counter()
        return True

    def _plan(self, epoch: int) -> tuple[list[tuple[Tensor, int]], list[int]]:
        """The remaining batches of an epoch, and the step of full data at which each of them ends."""
        per_epoch, start = self.epoch_steps, epoch * self.epoch_steps
        mine = None
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
            mine = self.order.only(self.sampler.retained, epoch)
            self._pruning = self.sampler.last_ratio > 0
            if self._pruning and self.step == start and self.rank == 0:
                self.retention.note(torch.arange(len(self.data.train)), self.sampler.retained)
        whole = self.order.epoch(epoch, 0, mine)
        batches = len(whole)
        if batches == 0:
            raise ValueError(
                f"less than one batch of {self.recipe.batch_size} samples is left in epoch {epoch}; take a smaller "
                "prune_ratio or batch_size"
            )
        # How many batches of this epoch have been trained on: the inverse of the steps below.
        first = -(-(self.step - start) * batches // per_epoch)
        ends = [min(start + (b + 1) * per_epoch // batches, self.steps) for b in range(first, batches)]
        # The last batch is the one that reaches the end.
        ends = ends[: ends.index(self.steps) + 1] if self.steps in ends else ends
        return whole[first : first + len(ends)], ends

    def _advance(self, end: int) -> bool:
        """Count a batch that ends at step `end` of full data; returns whether a round is over."""
        before, self.step = self.step, end
        for _ in range(end - before):
            self.policy.step()
        self._batches += 1
        if self._pruning:
            self._pruned_steps += end - before
        return end == self.steps or end // self.round_steps > before // self.round_steps

    def train_step(self, x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        """One step; returns the loss, detached, on the device."""
        x = tasks.laid_out(x, self.recipe)
        with tasks.autocast(self.recipe, self.device):
            if self.blocker is not None:
                x, y = self.blocker(x, y, ids=ids)
                if self.blocker.last is not None:
                    self.retention.note(ids, self.blocker.last.indices)
            outputs = self.wrapped(x)
            loss = self.task.loss(outputs, y, self._weights(ids))
            self._observe(ids, outputs, y)
        self.scaler.scale(loss).backward()
        if self.recipe.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def _weights(self, ids: Tensor) -> Tensor | None:
        """The factors of the losses, for a method that re-weights."""
        if self.blocker is not None:
            return None if self.blocker.last is None else self.blocker.last.weights
        if self.sampler is not None and self.sampler.reweights:
            return self.sampler.weights(ids)
        return None

    @torch.no_grad()
    def _observe(self, ids: Tensor, outputs: Any, y: Tensor) -> None:
        """Report the losses to a method that learns from them, and count the small ones."""
        if self.recorder is not None:
            self.recorder.observe(ids, outputs, y)
        blocked = self.blocker is not None and self.blocker.selector.wants_losses != "no"
        learns = blocked or (self.sampler is not None and self.sampler.learns)
        # Smoothing puts a floor under every loss, which flattens the scale that selectors look at: they get plain ones.
        smoothed = self.sampler is not None and self.sampler.learns and self.sampler.learns_from == "training loss"
        # In segmentation counting would take another pass over all pixels.
        counts = self.recipe.task == "classification"
        if not learns and not counts:
            return
        losses_B = self.task.losses(outputs, y, plain=not smoothed)
        if counts:
            plain_B = self.task.plain_losses(outputs, y) if smoothed else losses_B
            self._round.small += (plain_B < SMALL_LOSS).float().mean()
        if blocked and self.blocker is not None:
            self.blocker.observe(losses_B)
        elif learns and self.sampler is not None:
            self.sampler.observe(ids, losses_B)

    def _figures(self, loss: Tensor, epoch: int) -> dict[str, str]:
        figures = {"loss": f"{float(loss):.3f}", "epoch": str(epoch)}
        if self.blocker is not None:
            last = self.blocker.last
            figures["pruned"] = f"{1 - len(last.indices) * self.ranks / self.recipe.batch_size:.0%}" if last else "0%"
        if self._round.seconds:
            speed = self._round.steps * self.order.batch_size / self._round.seconds
            figures["samples/s"] = f"{speed:.0f}"
        return figures

    # ----------------------------------------------------------- end of a round

    def _new_round(self) -> Round:
        loss, small = torch.zeros(2, device=self.device)
        return Round(loss, small)

    def _end_round(self, logs: Logs) -> None:
        """Metrics, evaluation, checkpoint."""
        current, last = self._round, self.step == self.steps
        begin = time.perf_counter()
        sums = torch.stack([current.loss, current.small])
        if self.ranks > 1:
            dist.all_reduce(sums)
        mean, small = (sums / (current.steps * self.ranks)).tolist()
        current.seconds += time.perf_counter() - begin  # includes waiting for a GPU to finish the round
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss is {mean} in the round that ends at step {self.step}: the training has diverged. Lower "
                "optimizer.lr or set clip_norm; last.pt still holds the round before"
            )
        self.retention.end_round()
        # Where a batch stands for several steps, a round ends a little late. The last one may be shorter.
        number = -(-self.step // self.round_steps) if last else self.step // self.round_steps
        metrics = {
            "round": number,
            "step": self.step,
            "epoch": self.step / self.order.per_epoch,
            "loss": mean,
            **({"small_losses": small} if self.recipe.task == "classification" else {}),
            "lr": self.optimizer.param_groups[0]["lr"],
            **self._blocking(),
        }
        if last or number % self.recipe.evaluate_every == 0:
            with self.evaluation.statistics(self.model):
                metrics.update(self.evaluation(self.wrapped, last))
                if self.scoring is not None:
                    metrics["held_out_loss"] = self.scoring(self.model, self.step)
        times = {"seconds": current.seconds, "waited": current.waited, "load": os.getloadavg()[0]}
        logs.write({**metrics, **times, **self._diagnostics()})
        self._round = self._new_round()
        self._save(logs)

    def _blocking(self) -> dict[str, float]:
        """Samples so far, over all ranks; `spent` is their training cost in samples of full training."""
        if self.blocker is None:
            seen, retained = self.step * self.recipe.batch_size, self._batches * self.order.batch_size
            return {"seen": seen, "retained": retained, "spent": float(retained), "pruned_steps": self._pruned_steps}
        stats = self.blocker.stats
        return {
            "seen": stats.samples_seen * self.ranks,
            "retained": stats.samples_retained * self.ranks,
            "spent": stats.relative_flops * stats.samples_seen * self.ranks,
            "pruned_steps": stats.pruned_steps,
            "replayed": stats.steps_replayed,
            "recomputed": stats.steps_recomputed,
        }

    def _diagnostics(self) -> dict[str, float]:
        """The selector's figures about its choices since the run began or was resumed."""
        return {} if self.blocker is None else self.blocker.stats.diagnostics

    # -------------------------------------------------------------- checkpoints

    def _save(self, logs: Logs) -> None:
        random = _random(self.device)
        gathered: list[Any] = [random]
        if self.ranks > 1:
            gathered = [None] * self.ranks
            dist.all_gather_object(gathered, random)
        if self.folder is None or self.rank:
            return
        self.folder.save(
            {
                "version": VERSION,
                "step": self.step,
                "finished": self.step == self.steps,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "policy": self.policy.state_dict(),
                "scaler": self.scaler.state_dict(),
                "blocker": None if self.blocker is None else self.blocker.state_dict(),
                "sampler": None if self.sampler is None else self.sampler.state_dict(),
                "batches": self._batches,
                "pruned_steps": self._pruned_steps,
                "retention": self.retention.state_dict(),
                "round": self._round.state_dict(),
                "random": gathered,
                "metrics_length": logs.length,
                **({} if self.recorder is None else {"recorded": self.recorder.state_dict()}),
            }
        )

    def _resume(self) -> dict[str, Tensor] | None:
        """Load the folder's checkpoint, if there is one; returns this rank's random state."""
        if self.folder is None:
            return None
        state = self.folder.load()
        if state is None:
            if self.rank == 0:
                self.folder.truncate_metrics(0)
            return None
        if len(state["random"]) != self.ranks:
            raise ValueError(
                f"the run was trained by {len(state['random'])} processes, resume it with as many (now {self.ranks})"
            )
        try:
            self.restore(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(self.folder.refused(error)) from error
        if self.rank == 0:
            self.folder.truncate_metrics(state["metrics_length"])
        return state["random"][self.rank]

    def restore(self, state: dict[str, Any]) -> None:
        """Load a checkpoint of the same recipe; random generators are left alone."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy.load_state_dict(state["policy"])
        self.scaler.load_state_dict(state["scaler"])
        if self.blocker is not None:
            self.blocker.load_state_dict(state["blocker"])
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])
        if self.recorder is not None:
            self.recorder.load_state_dict(state["recorded"])
        self._batches, self._pruned_steps = state["batches"], state["pruned_steps"]
        self.retention.load_state_dict(state["retention"])
        sums = {name: state["round"][name].to(self.device) for name in ("loss", "small")}
        self._round = Round(**{**state["round"], **sums})
        self.step = state["step"]


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
