"""Accelerate: a blocker for a prepared model, saved and loaded with the rest."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..blocker.blocker import ForwardBlocker


def block(
    accelerator: Any, model: nn.Module, at: str | nn.Module | None, prune_ratio: float, **settings: Any
) -> ForwardBlocker:
    """A `ForwardBlocker` that `accelerator.save_state` saves and `accelerator.load_state` loads.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        blocker = block(accelerator, model, at="layer1", prune_ratio=0.4)
        for x, y in loader:
            with accelerator.accumulate(model):
                x, y = blocker(x, y)
                accelerator.backward(criterion(model(x), y))
                optimizer.step(); optimizer.zero_grad()

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: what `accelerator.prepare` returned.
        at, prune_ratio, **settings: see `ForwardBlocker`.
    """
    refuse_unsupported(accelerator, model)
    blocker = ForwardBlocker(model, at, prune_ratio, **settings)
    accelerator.register_for_checkpointing(blocker)
    return blocker


def refuse_unsupported(accelerator: Any, model: nn.Module) -> None:
    """Raise if processes share more than the gradients of one model: none of that was tested, except FSDP2."""
    kind = accelerator.distributed_type.value
    if kind == "FSDP":
        kind = "FSDP2" if getattr(accelerator, "is_fsdp2", False) else "FSDP1"
    if kind not in ("NO", "FSDP2") and not kind.startswith("MULTI_"):
        raise TypeError(f"halfway does not work with {kind}; use DDP (`accelerate launch --multi_gpu`, torchrun)")
    parallelism = getattr(accelerator, "parallelism_config", None)
    shared = getattr(model, "_tp_size", None) or getattr(parallelism, "non_data_parallel_size", None) or 1
    if shared > 1:
        raise TypeError(
            f"halfway does not work where {shared} processes share each batch (tensor, context or sequence "
            "parallelism), because each process would prune different samples; use DDP (torchrun)"
        )
