"""What `halfway bench` prints: one model's result as text."""

from __future__ import annotations

from typing import Any

from ...tables import columns


def text_table(result: dict[str, Any]) -> str:
    """One model's result for the terminal."""
    rows, notes = [], ""
    for way, entry in result["ways"].items():
        if "unavailable" in entry:
            rows.append([way, "n/a", "", "", "", ""])
            notes += f"\n\n{way} is not possible here: {entry['unavailable']}"
            continue
        wall = entry["wall"]
        predicted = f"{entry['predicted']:.3f}" if "predicted" in entry else ""
        spread = f"{wall['q1']:.3f}-{wall['q3']:.3f}"
        rows.append([way, f"{entry['flops']:.3f}", predicted, f"{wall['median']:.3f}", spread, f"{entry['peak']:.3f}"])
    N, S = result["input"][0], result["retained"]
    return (
        f"cut at {result['cut']}, {S} of {N} samples retained, F/T = {result['shallow_share']:.3f}; a full step takes "
        f"{result['ways']['full']['seconds']:.3f} s\n"
        f"relative to full training, {result['rounds']} rounds\n\n"
        + columns(["way", "FLOPs", "predicted", "wall", "quartiles", "peak memory"], rows)
        + _phases_line(result)
        + notes
    )


def _phases_line(result: dict[str, Any]) -> str:
    phases = result["ways"]["replay"].get("phases")
    if phases is None:
        return ""
    shallow = result["ways"]["full"]["phases"]["shallow"]
    return (
        f"\n\nin a replayed step: probe {phases['probe']:.3f}, selection {phases['selection']:.3f}, replayed shallow "
        f"forward {phases['replayed']:.3f}, rest {phases['rest']:.3f}; in a full step: shallow forward {shallow:.3f}"
    )
