"""The lines to paste into a training."""

from __future__ import annotations

from ..samplers import SAMPLERS
from ..selectors import SELECTORS
from .evidence import Finding
from .recommend import Costs, Recommendation


def lines(found: Recommendation, costs: Costs, at: str | None, epochs: float) -> str:
    """What to add or change; "" if nothing."""
    if found.kind == "do not prune":
        return ""
    if found.kind == "fewer epochs":
        fewer = max(1, round(epochs * (1 - costs.prune_ratio)))
        return f"epochs = {fewer}  # instead of {epochs:g}; let the learning rate end by then, too"
    finding = found.findings[0] if found.kind == "method" else None
    name = "random" if finding is None else finding.selector
    if name in SAMPLERS:
        return _sampler(name, finding, costs.prune_ratio)
    kind = SELECTORS[name]
    chosen = (
        f'"{name}"' if finding is None or not finding.settings else _made(f"halfway.selectors.{kind.__name__}", finding)
    )
    ids = ", ids=ids" if kind.wants_ids != "no" else ""
    loop = ["for x, y, ids in loader:  # of halfway.WithIds(dataset)"] if ids else ["for x, y in loader:"]
    after = kind.wants_losses != "no"
    if costs.waits and kind.needs == "nothing":
        targets = ", targets=targets" if kind.wants_targets != "no" else ""
        made = [
            f"batches = halfway.PrunedBatchSampler(dataset, batch_size, prune_ratio={costs.prune_ratio:g}, "
            f"selector={chosen}{targets})",
            f"loader = DataLoader({'halfway.WithIds(dataset)' if ids else 'dataset'}, batch_sampler=batches)",
        ]
        report = "    batches.observe(ids, losses)  # after the loss, one per sample"
        return "\n".join([*made, *([*loop, report] if after else [])])
    cut = f'"{at}"' if kind.needs == "features" else "None"
    made = [f"blocker = halfway.ForwardBlocker(model, {cut}, prune_ratio={costs.prune_ratio:g}, selector={chosen})"]
    report = "    blocker.observe(losses)  # after the loss, one per sample"
    return "\n".join([*made, *loop, f"    x, y = blocker(x, y{ids})", *([report] if after else [])])


def _sampler(name: str, finding: Finding | None, prune_ratio: float) -> str:
    kind = SAMPLERS[name].__name__
    settings = "" if finding is None else _settings(finding)
    more = f", {settings}" if settings else ""
    return (
        f"sampler = halfway.samplers.{kind}(dataset, {prune_ratio:g}{more})\n"
        "loader = DataLoader(dataset, batch_size, sampler=sampler)"
    )


def _made(kind: str, finding: Finding) -> str:
    return f"{kind}({_settings(finding)})"


def _settings(finding: Finding) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in finding.settings.items()).replace("'", '"')
