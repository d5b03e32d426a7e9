"""A small live model marks the samples that the large one is trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..batches.inputs import Call, targets_of
from ..engine.flops import Meter
from ..functional import all_finite
from ..state.flags import StickyFlag
from ..state.ranks import PendingSum, Ranks
from .base import Candidates, OutputRanking
from .tools.losses import LossFunction


class Proxy(OutputRanking):
    """Train on the samples that are hardest for a small model, which learns beside the large one.

    What: the proxy runs on all samples of a batch; the S with the largest loss stay. On those of every `every`-th batch
        the proxy is trained itself, by SGD. The large model never sees a pruned sample.
    Source: the form of `airbench96_faster` (Keller Jordan, cifar10-airbench, 2024), which there saves 37 % of the FLOPs
        at 96.0 % (the authors' numbers; 45 epochs, a proxy of about a seventh of the network's FLOPs). Theirs takes the
        proxy's loss and gradient from one forward pass; here the marked samples run once more.
    Cost: 1 - p, the proxy's forward pass of all samples, and its training step on the retained ones of every `every`-th
        batch: counted, and part of `stats.relative_flops`.
    Caveats: hard samples lose while a network underfits. A proxy weaker than the network finds other samples hard than
        the network does, wrong labels among them. Layers of the proxy that draw random numbers (dropout) move the
        global generators.

    Args:
        model: the proxy; takes what the model takes, and returns what `loss_fn` understands. Required.
        lr: of its SGD.
        momentum: of its SGD.
        weight_decay: of its SGD.
        every: it is trained on every so many-th batch.
        loss_fn, target: see `OutputRanking`.
    """

    name = "proxy"
    needs = "inputs"

    def __init__(
        self,
        model: nn.Module | None = None,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        every: int = 4,
        loss_fn: LossFunction | None = None,
        target: int | str | None = None,
    ) -> None:
        super().__init__(loss_fn, target)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the selector 'proxy' needs a small model that marks samples: Proxy(model=...), got {model!r}"
            )
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if not (lr > 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(
                f"SGD takes lr > 0, momentum in [0, 1) and weight_decay >= 0, got {lr}, {momentum}, {weight_decay}"
            )
        self.model = model
        self.lr, self.momentum, self.weight_decay, self.every = lr, momentum, weight_decay, every
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._velocity = [torch.zeros_like(p) for p in self._trained]
        self._batches = 0
        self._diverged = StickyFlag()
        self._pending: PendingSum | None = None
        # FLOPs per sample of a forward pass and of a training step, known after the first; and those not charged yet.
        self._forward_flops = self._step_flops = 0.0
        self._spent = 0.0

    def importance(self, candidates: Candidates) -> Tensor:
        self._settle()
        self._to(candidates.generator.device)
        # As in training, for BatchNorm; but only training moves what it remembers.
        before = [(b, b.clone()) for b in self.model.buffers()]
        was_training = self.model.training
        self.model.train()
        try:
            outputs = self._run(candidates.required_call)
        finally:
            self.model.train(was_training)
            for buffer, value in before:
                buffer.copy_(value)
        self._spent += candidates.size * self._forward_flops
        return self._losses_of(outputs, candidates.targets, candidates.size).detach()

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        self._settle()
        self._to(candidates.generator.device)
        turn, self._batches = self._batches % self.every, self._batches + 1
        if turn:
            return
        call = candidates.required_call if retained is None else candidates.required_call.part(retained)
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            losses_S = self._losses_of(self._run(call), targets_of(call.whole, self.target), call.size)
            gradients = torch.autograd.grad(losses_S.sum(), self._trained, allow_unused=True)
        self._spent += call.size * self._step_flops
        total = torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for p, g in zip(self._trained, gradients, strict=True)
            ]
            + [b.flatten().to(losses_S.dtype) for b in self._averaged()]
            # Made on the device: a tensor of Python's numbers would be copied there, and waited for.
            + [losses_S.new_full((1,), call.size), losses_S.new_ones(1)]
        )
        ranks = candidates.ranks
        if ranks.size == 1:
            self._step(total)
            return
        self._pending = ranks.sum(total, self)
        if not ranks.defer:
            self._settle()

    def spent_flops(self) -> float:
        spent, self._spent = self._spent, 0.0
        return spent

    def send_nothing(self, ranks: Ranks) -> None:
        """Called instead of `learn` on a rank that has no batches left."""
        self._settle()
        turn, self._batches = self._batches % self.every, self._batches + 1
        if not turn:
            shared = [*self._trained, *self._averaged()]
            self._pending = ranks.sum(shared[0].new_zeros(sum(t.numel() for t in shared) + 2), self)

    def check(self) -> None:
        self._settle()
        super().check()
        if self._diverged.take():
            raise FloatingPointError(
                "the proxy's gradient was not finite (NaN or infinite); such a batch teaches it nothing. Lower the "
                "proxy's lr, or check the inputs"
            )

    def config(self) -> dict[str, Any]:
        count = sum(p.numel() for p in self.model.parameters())
        return {**super().config(), "model": f"{type(self.model).__name__} of {count} parameters"}

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {
            "model": {name: value.detach() for name, value in self.model.state_dict().items()},
            "velocity": list(self._velocity),
            "batches": self._batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if sorted(state) != ["batches", "model", "velocity"] or len(state["velocity"]) != len(self._velocity):
            raise ValueError("the state of the selector 'proxy' has 'batches', 'model' and 'velocity' of another proxy")
        self._settle()
        self.model.load_state_dict(state["model"])
        for mine, found in zip(self._velocity, state["velocity"], strict=True):
            mine.copy_(found)
        self._batches = int(state["batches"])

    # ---------------------------------------------------------------------------

    def _run(self, call: Call) -> Any:
        args, kwargs = call.inputs.args, call.inputs.kwargs
        if self._step_flops:
            return self.model(*args, **kwargs)
        with torch.enable_grad(), Meter() as meter:  # with grad, so that it shows what needs one
            outputs = self.model(*args, **kwargs)
        self._forward_flops = meter.forward / call.size
        self._step_flops = (meter.forward + meter.backward) / call.size
        return outputs

    def _losses_of(self, outputs: Any, targets: Any, size: int) -> Tensor:
        return self.losses(Candidates(size, torch.Generator("cpu"), outputs=outputs, targets=targets))

    def _averaged(self) -> list[Tensor]:
        """Running statistics: every rank has moved its own."""
        return [b for b in self.model.buffers() if b.is_floating_point()]

    def _settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._step(pending.wait())

    def _step(self, total: Tensor) -> None:
        """SGD with the mean gradient of all ranks' samples."""
        samples, ranks = total[-2].clamp_min(1), total[-1].clamp_min(1)
        finite = all_finite(total)
        self._diverged.note(~finite)
        shared = [*self._trained, *self._averaged()]
        parts = iter(total[:-2].split([t.numel() for t in shared]))
        for p, v in zip(self._trained, self._velocity, strict=True):
            gradient = next(parts).view_as(p) / samples + self.weight_decay * p.detach()
            v.copy_(torch.where(finite, self.momentum * v + gradient, v))
            p.detach().sub_(torch.where(finite, self.lr * v, 0.0))
        for buffer, values in zip(self._averaged(), parts, strict=True):
            buffer.copy_(torch.where(finite, values.view_as(buffer) / ranks, buffer))

    def _to(self, device: torch.device) -> None:
        if self._trained and self._trained[0].device != device:
            self.model.to(device)
            self._velocity = [v.to(device) for v in self._velocity]
            self._trained = [p for p in self.model.parameters() if p.requires_grad]
