"""What a training shows about each sample as it goes: when it is forgotten, and by how much it is right.

Shape suffixes: N samples of the data set, B of a batch, C classes, W columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..settings import plain_settings
from ..state.ranks import ALONE, Ranks
from ..state.sample_memory import SampleMemory
from .outputs import margins

# Columns of the memory.
_PRESENTED, _CORRECT, _LEARNED, _FORGOTTEN, _MARGIN = range(5)


class Dynamics:
    """Records every presentation of every sample in a training run.

    Call `observe` in each training step with the logits that the loss is computed from. Nothing waits for the device.
    Memory: 20 bytes per sample.

    Args:
        num_samples: N; ids are 0..N-1.
        ranks: the processes that train together; each must then call `observe` equally often.
    """

    @plain_settings
    def __init__(self, num_samples: int, ranks: Ranks = ALONE) -> None:
        self.num_samples = num_samples
        self._ranks = ranks
        self._memory = SampleMemory(5, num_samples, unknown=0.0)

    def observe(self, ids: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Learn from one presentation.

        A sample whose logits are not finite is left as it was. If an id occurs twice in a batch, the last one counts.

        Args:
            ids: (B,).
            logits: (B, C).
            targets: (B,) classes; of mixed or smoothed targets pass the plain label.
        """
        if targets.ndim != 1 or targets.is_floating_point():
            raise ValueError(
                f"targets must be one class per sample, shape (B,), got {targets.dtype} of shape "
                f"{tuple(targets.shape)}; mixed images have no label of their own: record without mixup and cutmix, "
                "and of one-hot targets pass targets.argmax(1)"
            )
        margins_B = margins(logits.detach(), targets)
        old_BW = self._memory.read(ids, margins_B.device)
        presented_B = old_BW[:, _PRESENTED] + 1
        correct_B = (margins_B > 0).to(old_BW.dtype)
        # A sample that was never seen was not correct, so that its first mistake is no forgetting.
        forgotten_B = old_BW[:, _FORGOTTEN] + old_BW[:, _CORRECT] * (1 - correct_B)
        mean_B = old_BW[:, _MARGIN] + (margins_B.to(old_BW.dtype) - old_BW[:, _MARGIN]) / presented_B
        learned_B = torch.maximum(old_BW[:, _LEARNED], correct_B)
        new_BW = torch.stack([presented_B, correct_B, learned_B, forgotten_B, mean_B], 1)
        new_BW = torch.where(margins_B.isfinite().unsqueeze(1), new_BW, old_BW)
        self._memory.write(ids, new_BW, self._ranks)

    @property
    def presentations_N(self) -> Tensor:
        """How often each sample was presented."""
        return self._column(_PRESENTED).to(torch.int64)

    @property
    def forgotten_N(self) -> Tensor:
        """How often each sample was classified correctly at one presentation and wrongly at the next."""
        return self._column(_FORGOTTEN).to(torch.int64)

    @property
    def learned_N(self) -> Tensor:
        """Whether a sample was ever classified correctly."""
        return self._column(_LEARNED) > 0

    @property
    def margins_N(self) -> Tensor:
        """The true logit minus the largest other one, mean over all presentations."""
        return self._column(_MARGIN)

    def check(self) -> None:
        """Raise what went wrong on the device, and if a sample was never presented. May wait for the device."""
        self._memory.check()
        unseen_N = self.presentations_N == 0
        if unseen_N.any():
            raise ValueError(
                f"{int(unseen_N.sum())} of {self.num_samples} samples were never presented to the training that was "
                f"recorded, for example {int(unseen_N.nonzero()[0])}; record at least one epoch on all data, with "
                "nothing pruned and drop_last=False (or several epochs in shuffled order)"
            )

    def _column(self, column: int) -> Tensor:
        return self._memory.values[:, column].cpu()

    def state_dict(self) -> dict[str, Any]:
        """{"values": one tensor}."""
        return self._memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._memory.load_state_dict(state)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Dynamics:
        """From the state alone."""
        found = cls(len(state["values"]))
        found.load_state_dict(state)
        return found
