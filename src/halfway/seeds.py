"""Seeds computed from a position: (seed, epoch), (seed, epoch, step, rank), ..."""

from __future__ import annotations

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


def seed_of(*parts: int) -> int:
    """One seed from several numbers; neighbouring numbers give seeds spread over the whole range."""
    mixed = 0
    for part, factor in zip(parts, _MIX, strict=False):
        mixed = ((mixed ^ (part + 1)) * factor) % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63
