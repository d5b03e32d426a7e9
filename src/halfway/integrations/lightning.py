"""Lightning: a callback. The LightningModule stays as it is.

A callback cannot replace the batch, and the hook that moves it to its device runs outside the precision context. So the
callback wraps `training_step`: there the batch is on its device, autocast is on, and under DDP the forward pass has
begun.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .. import selectors
from ..blocker.blocker import ForwardBlocker
from ..engine.interception import Interception
from ._fields import Fields
from ._logs import logged
from ._training_step import checked, locate_cut

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

_REFUSED = {"FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy"}


class ForwardBlocking(Callback):
    """Blocks samples in every training step.

        trainer = Trainer(callbacks=[ForwardBlocking(at="net.layer1", prune_ratio=0.4)])

    Args:
        at: the cut, by its name in the LightningModule; None for a selector that needs no features.
        prune_ratio: share of each batch to prune, in [0, 1).
        model: the submodule that `training_step` calls with the batch's inputs, if it does not call `self(...)`.
            None: the LightningModule itself if it has a `forward`, otherwise its child that holds the cut.
        ids, inputs: where in the batch they are, see `Fields`.
        losses: if `training_step` returns a dict with this entry, the per-sample losses in it are fed back
            (`ForwardBlocker.observe`) to selectors that learn from them.
        log: whether to log ratio and cost, as "halfway/...".
        **settings: further arguments of `ForwardBlocker`: selector, schedule, reuse, seed, ...

    Attributes:
        blocker: the `ForwardBlocker`, from the start of `fit` on; its `stats` can still be read after `fit`.
    """

    def __init__(
        self,
        at: str | None,
        prune_ratio: float,
        *,
        model: str | None = None,
        ids: int | str | None = None,
        inputs: Any = None,
        losses: str = "losses",
        log: bool = True,
        **settings: Any,
    ) -> None:
        self.blocker: ForwardBlocker | None = None
        self._at, self._prune_ratio, self._model, self._settings = at, prune_ratio, model, settings
        self._fields, self._losses, self._log = Fields(ids, inputs), losses, log
        self._state: dict[str, Any] = {}
        self._standing_in: Interception | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs after the strategy's set-up and before training, so that wrong settings are found early."""
        refused = _REFUSED & {kind.__name__ for kind in type(trainer.strategy).__mro__}
        if refused:
            raise TypeError(f"ForwardBlocking does not work with {refused.pop()}; use DDP, or one device")
        if pl_module._compiler_ctx is not None:
            raise TypeError(
                "a compiled LightningModule cannot be blocked; compile only submodules behind the cut: "
                "halfway.compile(module.net, at=...)"
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise TypeError("ForwardBlocking needs training_step(batch, ...), not training_step(dataloader_iter)")
        if self.blocker is not None:  # from an earlier fit, which this one continues
            self._state = self.blocker.state_dict()
            self.blocker.remove()
        where = locate_cut(pl_module, self._model, self._at)
        model = pl_module.get_submodule(where.model)
        # For a selector that needs outputs, `at` only says which model is meant.
        needs = selectors.kind(self._settings.get("selector", "density")).needs
        at = None if needs == "outputs" else where.at
        self.blocker = ForwardBlocker(model, at, self._prune_ratio, **self._settings)
        if self._state:
            self.blocker.load_state_dict(self._state)
        first = True

        def training_step(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal first
            step, first = checked(pl_module, where, original) if first else original, False
            return self._step(step, *args, **kwargs)

        self._standing_in = Interception(pl_module, "training_step", training_step)
        # Lightning inspects its signature.
        vars(self._standing_in)["__wrapped__"] = self._standing_in.original

    def _step(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's training step, on the retained samples."""
        assert self.blocker is not None
        output = step(self._fields.retain(self.blocker, batch), *args, **kwargs)
        if isinstance(output, Mapping) and self._losses in output:
            self.blocker.observe(output[self._losses])
        return output

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.blocker is not None
        self.blocker.set_epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # The statistics wait for the device: only where Lightning writes its logs anyway.
        if self._log and self.blocker is not None and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(logged(self.blocker), on_step=True, on_epoch=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._log and self.blocker is not None:
            pl_module.log_dict(logged(self.blocker), on_step=False, on_epoch=True, sync_dist=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Leave the module as it was. The blocker's statistics and state can still be read."""
        if self._standing_in is not None:
            self._standing_in.remove()
            self._standing_in = None
        if self.blocker is not None:
            self.blocker.remove()

    def state_dict(self) -> dict[str, Any]:
        return self._state if self.blocker is None else self.blocker.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
        if self._standing_in is None:  # fit has not begun; drop what an earlier one left
            self.blocker = None
        elif self.blocker is not None:
            self.blocker.load_state_dict(state_dict)
