"""The blocker's state as a file in a trainer's checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ..blocker.blocker import ForwardBlocker
from ..state.files import replacing

_NAME = "halfway.pt"


def save(blocker: ForwardBlocker, folder: str) -> None:
    """All of it or nothing."""
    with replacing(Path(folder, _NAME)) as file:
        torch.save(blocker.state_dict(), file)


def load(blocker: ForwardBlocker, folder: str) -> None:
    """Load what `save` wrote."""
    path = Path(folder, _NAME)
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {_NAME}: it was saved without BlockingMixin, or with save_only_model=True. Start again "
            "with its weights: from_pretrained(...), and train() without resume_from_checkpoint"
        )
    blocker.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
