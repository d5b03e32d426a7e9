"""`ForwardBlocker`: the one line in the training loop. Probe, select, and let the model's next call replay."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .. import selectors
from ..batches.batch import Batch
from ..batches.inputs import Call, Forward, targets_of
from ..batches.reading import Readings
from ..engine.autocast import autocast_from_text
from ..engine.cut import Cut, CutSkipped, Seen
from ..engine.engine import Engine
from ..engine.probe import step_flops
from ..functional import retained_count
from ..modules import find_layer, group_of, suggest, unwrap
from ..ratios import PruneRatio, Ratios
from ..schedule import Schedule, check_schedule
from ..seeds import seed_of
from ..selectors import Candidates, Selection, Selector
from ..selectors.base import aside
from ..selectors.earlier import config_today
from ..settings import as_json, from_0, plain_settings, require_same_config
from ..state.ranks import Ranks
from ..stats import Counters, Stats
from .compilation import to_be_compiled
from .feedback import Feedback
from .refusals import check_at, check_layer, check_model, check_root
from .reminders import Reminders

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REUSE = ("auto", "replay", "recompute")
_STATE_VERSION = 1
_STATE = {"version", "config", "epoch", "ranks", "autocast", "counters", "selector"}
_live: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ForwardBlocker]] = weakref.WeakKeyDictionary()


class ForwardBlocker(Joinable):
    """Drops samples in the middle of the forward pass.

        blocker = halfway.ForwardBlocker(model, at="layer1", prune_ratio=0.3)
        for x, y in loader:
            x, y = blocker(x, y)              # <- the new line in the loop
            loss = criterion(model(x), y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()

    The call runs the model up to the cut on the whole batch, chooses the samples to retain, and returns the batch
    without the others. The following `model(x)` reuses the shallow activations of the retained samples.

    Args:
        model: any module; wrappers (DDP, torch.compile) are looked through.
        at: the cut, a submodule of the unwrapped model or its name; None for a selector that needs no features (one
            that scores by losses or gradients looks at the model's outputs, wherever `at` is).
        prune_ratio: share of each batch to prune, in [0, 1); or `halfway.ramp(...)`, `halfway.steps(...)`, or a
            function of the epoch (of the step, if the schedule counts steps).
        selector: "density" (the paper's), "random", any name in `halfway.selectors.SELECTORS`, or a `Selector` such as
            `halfway.Density(noise=0.001)`.
        schedule: when to prune; None: always.
        reuse: "auto" replays and falls back to recomputing with one warning; "replay" raises instead of falling back;
            "recompute" never replays, and is bit-identical to training on the retained samples alone.
        seed: of the selector's randomness, a function of (seed, step, rank). Global generators are not touched.
        process_group: of the ranks that train this model together; None: DDP's, or all. Each rank retains samples of
            its own batch, and what the selector learns is the same on all of them.
        timeout: seconds to wait for the other ranks before an error says which one is missing.
        output: which part of what the layer returns is the cut, if that is a tuple or a mapping: a position or a name.

    Attributes:
        last: the `Selection` of the last pruned step (None before the first, and after a step that pruned nothing).
        stats: a `Stats` snapshot.
    """

    @plain_settings
    def __init__(
        self,
        model: nn.Module,
        at: str | nn.Module | None,
        prune_ratio: PruneRatio,
        *,
        selector: str | Selector = "density",
        schedule: Schedule | None = None,
        reuse: Literal["auto", "replay", "recompute"] = "auto",
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        timeout: float = 300.0,
        output: int | str | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        check_at(at)
        check_schedule(schedule)
        if reuse not in _REUSE:
            raise ValueError(f"unknown reuse {reuse!r}; choose one of {_REUSE}")
        self.selector = selectors.make(selector)
        self.schedule = schedule or Schedule()
        self._ratios = Ratios(prune_ratio, self.schedule)
        self.reuse = reuse
        self.seed = seed
        self.last: Selection | None = None
        self._counters = Counters()
        self._epoch: int | None = None
        self._validated = False
        self._removed = False
        self._reminders = Reminders(self._counters)
        self._step_flops = 0.0  # of the model, per sample; only for selectors with a model of their own
        self._root, self._compiled = unwrap(model)
        check_root(self._root)
        self._forward, self._readings = Forward(self._root), Readings()
        self._engine: Engine | None = None
        self._layer_name = ""
        if _live.get(self._root, lambda: None)() is not None:
            raise ValueError("this model already has a live ForwardBlocker; call its remove() first")
        self._feedback = Feedback(self.selector, self._root, self._compiled)
        cut: Cut | None = None
        if self.selector.needs == "outputs":
            if at is not None:
                warnings.warn(
                    f"the selector {self.selector.name!r} looks at the model's output, so the cut "
                    f"at={find_layer(self._root, at)[0]!r} is not used; pass at=None",
                    stacklevel=3,
                )
            if to_be_compiled(self._root):
                warnings.warn(
                    f"the selector {self.selector.name!r} looks at the model's output, so nothing comes after the cut "
                    "that could be compiled; use torch.compile(model) instead of halfway.compile",
                    stacklevel=3,
                )
            cut = Cut(self._root, self._root, "the model's output", self._compiled, self._feedback.watched)
        elif at is not None:
            self._layer_name, layer = find_layer(self._root, at)
            check_layer(self._layer_name, layer)
            self.selector.bind(self._layer_name, layer)
            if self.selector.needs == "features":
                cut = Cut(self._root, layer, self._layer_name, self._compiled, output=output)
        elif self.selector.needs == "features":
            raise ValueError(
                f"the selector {self.selector.name!r} looks at features, so at= must name a layer "
                f"({suggest(self._root, '')}; `halfway layers` lists what each would save)"
            )
        as_json(self._config(), "ForwardBlocker")  # an error now rather than at the first checkpoint
        self._ranks = Ranks(process_group or group_of(model), timeout)
        if cut is not None:
            self._engine = Engine(cut, reuse, self._counters, several_ranks=self._ranks.size > 1)
            # A blocker that is garbage leaves the model as remove() would.
            weakref.finalize(self, self._engine.close)
        self._ranks.agree({**self._config(), "reuse": reuse})
        _live[self._root] = weakref.ref(self)

    # -------------------------------------------------------------- the one line

    def __call__(self, *batch: Any, ids: Tensor | None = None, inputs: Any = None, **named: Any) -> Any:
        """The retained part of the batch, in the structure it came in.

        Args:
            *batch: the batch by position. The first part goes to the model: a tensor as it is, a mapping as keywords,
                a tuple as positionals. So does a list of tensors that each hold all samples; one with an entry per
                sample (a detector's images) is one argument. The rest is only cut.
            ids: (B,) sample ids, for selectors that remember samples.
            inputs: what goes to the model, if not as said: positions in `batch`, or names in `named` (a name that
                `forward` does not know goes by position). The model may then be called with more than these, such as
                labels: you say that what comes before the cut does not look at it.
            **named: the batch by name. The names in the model's `forward` signature go to it, and plain values
                (`output_hidden_states=True`) if it has `**kwargs`.

        Returns:
            One part for one, a tuple for several, a dict for names. Unchanged in eval mode, without grad, and outside
            the schedule.
        """
        self._ensure_live()
        if self._engine is not None:
            self._engine.drop()
        if bool(batch) == bool(named):
            raise TypeError("pass the batch either by position, blocker(x, y), or by name, blocker(x=x, y=y)")
        whole = self._forward.read(Batch(batch, named, readings=self._readings), inputs)
        self._feedback.forget()
        if not self._root.training or not torch.is_grad_enabled():
            if torch.is_grad_enabled():
                self._reminders.in_eval_mode(self._ratios.largest)
            return whole.value()
        call = Call(self._forward, whole, inputs)
        targets = None if self.selector.wants_targets == "no" else targets_of(whole, self.selector.target)
        self._feedback.check(call.size, ids, targets)
        self._check_schedule()
        if self._engine is not None and not self._validated:
            # Also where nothing is pruned yet: an error should come in the first second, not in epoch 6.
            with self._forward.explaining(whole):
                self._engine.validate(call, retained_count(call.size, self._ratios.largest))
        if self.selector.needs == "inputs" and not self._validated:
            self._step_flops = step_flops(self._root, self._compiled, call)
        self._validated = True
        Join.notify_join_context(self)
        self._ranks.defer = self._join_config.enable
        # What is drawn is a function of seed, step and rank.
        generator = torch.Generator(call.inputs.tensors()[0].device)
        generator.manual_seed(seed_of(self.seed, self._counters.steps, self._ranks.rank))
        candidates = Candidates(call.size, generator, ids=ids, targets=targets, ranks=self._ranks, call=call)
        return self._step(call, candidates).value()

    def _step(self, call: Call, candidates: Candidates) -> Batch:
        counters, selector, engine, size = self._counters, self.selector, self._engine, call.size
        count = retained_count(size, self.prune_ratio) if self.schedule.active(self._position) else size
        part, selection = call, None
        if count == size:
            if engine is not None:
                engine.watch(size, lambda seen: _learn(selector, _seeing(candidates, selector, seen), None))
            else:
                _learn(selector, candidates, None)
        elif engine is None:
            selection = _select(selector, candidates, count)
            part = call.part(selection.indices)
            _learn(selector, candidates, selection.indices)
        else:
            try:
                part, selection = self._block(engine, call, candidates, count)
            except CutSkipped:
                count = size
                warnings.warn(
                    f"layer {self._layer_name!r} did not run in this batch (layer drop?), so nothing could be scored "
                    "and all samples were retained; cut at a layer that always runs",
                    stacklevel=3,
                )
        # Counted last: a step that raised leaves no trace.
        counters.steps += 1
        counters.pruned_steps += count < size
        counters.seen += size
        counters.retained += count
        counters.spent += count
        if engine is not None and count < size:
            counters.spend_shallow(size - count)
        if self._step_flops:
            counters.spent += selector.spent_flops() / self._step_flops
        self.last = selection
        self._feedback.expect(candidates, None if selection is None else selection.indices)
        return part.whole

    def _block(self, engine: Engine, call: Call, candidates: Candidates, count: int) -> tuple[Call, Selection]:
        """Probe, select, and prepare the model's call on the retained samples."""
        probe = engine.probe(call)
        try:
            candidates = _seeing(candidates, self.selector, probe.seen)
            selection = _select(self.selector, candidates, count)
            part = call.part(selection.indices)
            plan = engine.plan(probe, call, count)
            _learn(self.selector, candidates, selection.indices)
        except BaseException:
            probe.rewind()
            raise
        engine.prepare(probe, plan, part, selection.indices)
        return part, selection

    def _check_schedule(self) -> None:
        changes = not self.schedule.always or self._ratios.change
        if self._epoch is None and self.schedule.unit == "epoch" and changes:
            raise RuntimeError(
                f"{self.schedule} counts epochs, but set_epoch was never called; call blocker.set_epoch(epoch) at the "
                "start of each epoch, or use Schedule(..., unit='step')"
            )

    def _ensure_live(self) -> None:
        if self._removed:
            raise RuntimeError("this ForwardBlocker was removed from its model; make a new one")

    # ------------------------------------------------------------ around the loop

    @property
    def prune_ratio(self) -> float:
        """Share of each batch to prune at this point of the run, in [0, 1). May be changed between batches, on all
        ranks alike."""
        return self._ratios.at(self._position)

    @prune_ratio.setter
    def prune_ratio(self, value: PruneRatio) -> None:
        self._ratios = Ratios(value, self.schedule)

    @property
    def _position(self) -> int:
        """Where the run is, in the schedule's unit."""
        return (self._epoch or 0) if self.schedule.unit == "epoch" else self._counters.steps

    def __repr__(self) -> str:
        return (
            f"ForwardBlocker({type(self._root).__name__}, at={self._layer_name or None!r}, "
            f"prune_ratio={self._ratios}, selector={self.selector.name!r}, schedule={self.schedule}, "
            f"reuse={self.reuse!r}{', removed' if self._removed else ''})"
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell the schedule which epoch begins; raise what went wrong on the device in the last one."""
        self._ensure_live()
        epoch = from_0("epoch", epoch)
        self._check()
        self._reminders.epoch_begins(self._epoch, self.schedule, self.prune_ratio)
        self._epoch = epoch

    @property
    def stats(self) -> Stats:
        """What blocking has done so far. Waits for the device; raises what went wrong there."""
        self._check()
        return Stats.of(self._counters, self.selector.diagnostics(), self.selector.explanation() if self.last else "")

    def explain(self) -> str:
        """A table of the operations before the cut: replayed, or computed, and why. Of the last pruned step."""
        if self._engine is None:
            return f"the selector {self.selector.name!r} looks at nothing before the model runs: no probe, no replay"
        return self._engine.explain()

    def observe(self, losses: Tensor) -> None:
        """Per-sample losses (S,) of the retained samples, for selectors that learn from them; others ignore it.

        An optional line after the loss: `losses = criterion(model(x), y); blocker.observe(losses)`. The losses are
        detached; nothing waits for the device.
        """
        self._ensure_live()
        self._feedback.observe(losses)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later: small, plain tensors and values, loads with `weights_only=True`.

        It is the same on all ranks but for the counts behind `stats`: saving that of one rank is enough. Its keys and
        shapes are always the same, so that `torch.distributed.checkpoint` can load it in place.
        """
        self._check()
        return {
            "version": _STATE_VERSION,
            "config": as_json(self._config(), "ForwardBlocker"),
            "epoch": self._epoch,
            "ranks": self._ranks.size,
            "autocast": self._engine.autocast.as_text() if self._engine is not None else "",
            "counters": self._counters.state_dict(),
            "selector": self.selector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. The state of another configuration is refused."""
        self._ensure_live()
        if not isinstance(state, dict) or set(state) != _STATE:
            raise ValueError(f"this is not the state_dict of a ForwardBlocker, which has {sorted(_STATE)}")
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"the state has version {state['version']}, this halfway reads {_STATE_VERSION}")
        require_same_config(config_today(state["config"]), self._config(), "ForwardBlocker")
        autocast = autocast_from_text(state["autocast"])
        Counters().load_state_dict(state["counters"])
        self.selector.load_state_dict(state["selector"])
        self._ranks.forget_senders()
        # From here on nothing can fail: all of it was read once.
        self._counters.load_state_dict(state["counters"])
        if self._engine is not None:
            self._engine.autocast.load(autocast)
        self._epoch = state["epoch"]
        self._reminders.forget()
        self.last = None
        if state["ranks"] != self._ranks.size:
            warnings.warn(
                f"the state was saved by {state['ranks']} processes and is loaded by {self._ranks.size}: training goes "
                "on, but not bit-identically (what was learned is kept, random numbers depend on the rank)",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Let go of the model. Also happens at the end of a `with` block."""
        if self._removed:
            return
        self._removed = True
        if self._engine is not None:
            self._engine.close()
        self._feedback.forget()
        self._ranks.close()
        _live.pop(self._root, None)

    def __enter__(self) -> ForwardBlocker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    # ------------------------------------- uneven batches: Join([ddp, blocker])

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank does when it has no batches left and others have."""
        return _JoinedRank(self)

    @property
    def join_device(self) -> torch.device:
        return next((p.device for p in self._root.parameters()), torch.device("cpu"))

    @property
    def join_process_group(self) -> Any:
        return self._ranks.group

    def _check(self) -> None:
        self.selector.check()
        if self._engine is not None:
            self._engine.check()

    def _config(self) -> dict[str, Any]:
        settings = {f"selector.{k}": v for k, v in self.selector.config().items()}
        schedule = {f"schedule.{k}": v for k, v in vars(self.schedule).items()}
        return {
            "at": self._layer_name,
            "prune_ratio": self._ratios.config(),
            "seed": self.seed,
            "selector": self.selector.name,
            **settings,
            **schedule,
        }


class _JoinedRank(JoinHook):
    """Takes part in every step that another rank still has."""

    def __init__(self, blocker: ForwardBlocker) -> None:
        self._blocker = blocker

    def main_hook(self) -> None:
        blocker = self._blocker
        # Also counted, so that a schedule in steps means the same steps everywhere.
        blocker._counters.steps += 1
        sent = blocker._ranks.send_nothing()
        if not sent and not blocker._validated and blocker._ranks.size > 1 and _learns(blocker.selector):
            raise RuntimeError(
                "this rank has no batch at all, so it cannot take part in what the others learn; give every rank at "
                "least one batch"
            )

    def post_hook(self, is_last_joiner: bool) -> None:
        # Join itself leaves its configuration behind.
        config = self._blocker._join_config
        self._blocker._join_config = config.construct_disabled_join_config()


def _seeing(candidates: Candidates, selector: Selector, seen: Seen) -> Candidates:
    """The candidates with what the selector needs to see."""
    if selector.needs == "features":
        return replace(candidates, features=seen.features)
    return replace(candidates, outputs=seen.outputs, watched=seen.watched)


def _select(selector: Selector, candidates: Candidates, count: int) -> Selection:
    with aside(candidates.generator.device):
        return selector.select(candidates, count)


def _learn(selector: Selector, candidates: Candidates, retained: Tensor | None) -> None:
    with aside(candidates.generator.device):
        selector.learn(candidates, retained)


def _learns(selector: Selector) -> bool:
    """Whether it learns in every step, whatever the user reports."""
    kind = type(selector)
    return kind.learn is not Selector.learn or kind.note is not Selector.note
