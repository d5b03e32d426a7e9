"""What a training leaves behind for coresets, beside its weights: the recipe's `record`.

nothing       the usual run
dynamics      when each sample was forgotten and by how much it was right, in the checkpoint: `coresets.Dynamics`
checkpoints   the weights before ten steps, and the learning rate of these, RUN/points/STEP.pt: {"step", "lr", "model"}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...coresets import Dynamics
from ...state.ranks import ALONE, Ranks
from ..files import write_tensors
from .rank import rank_and_size

if TYPE_CHECKING:
    from ..recipes.schema import Recipe
    from .loop import Training

POINTS = 10
FOLDER = "points"


class Recorder:
    """Called by the training loop; a subclass does what it needs. Its state is in the checkpoint."""

    def observe(self, ids: Tensor, outputs: Tensor, y: Tensor) -> None:
        """In each step, without gradients. Nothing may wait for the device."""

    def begin_step(self, training: Training) -> None:
        """Before each step. A run that goes on from a checkpoint does this again, with the same weights."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DynamicsRecorder(Recorder):
    def __init__(self, samples: int) -> None:
        ranks = ALONE if rank_and_size()[1] == 1 else Ranks(None, 300.0, "Dynamics", "observe outputs")
        self.dynamics = Dynamics(samples, ranks)

    def observe(self, ids: Tensor, outputs: Tensor, y: Tensor) -> None:
        self.dynamics.observe(ids, outputs, y)

    def state_dict(self) -> dict[str, Any]:
        return self.dynamics.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dynamics.load_state_dict(state)


class Snapshots(Recorder):
    """Keeps the weights in the middle of each `POINTS`-th part of the run. (At its end the learning rate is 0, and so
    is what a checkpoint would add.)"""

    def begin_step(self, training: Training) -> None:
        # Of the part that this step is in.
        middle = (2 * (training.step * POINTS // training.steps) + 1) * training.steps // (2 * POINTS)
        if training.folder is None or training.rank or training.step != middle:
            return
        content = {
            "step": training.step,
            "lr": training.optimizer.param_groups[0]["lr"],
            "model": training.model.state_dict(),
        }
        write_tensors(training.folder.path / FOLDER / f"{training.step:08d}.pt", content)


def make(recipe: Recipe, samples: int) -> Recorder | None:
    """What the recipe says to record; None if that is nothing."""
    if recipe.record == "nothing":
        return None
    return DynamicsRecorder(samples) if recipe.record == "dynamics" else Snapshots()


def check(recipe: Recipe) -> None:
    """Raise if the recipe cannot be recorded."""
    if recipe.record == "dynamics" and (recipe.task != "classification" or recipe.selector() is not None):
        raise ValueError(
            "record=dynamics is about every presentation of every sample in classification; take such a recipe with "
            "method=full, or drop record="
        )
