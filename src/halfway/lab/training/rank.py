"""The rank of this process among those that train together."""

from __future__ import annotations

import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) for a process on its own."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def wait_for_all() -> None:
    """Until every process is here, and what the first has written can be read."""
    if rank_and_size()[1] > 1:
        dist.barrier()
