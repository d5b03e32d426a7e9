"""The lines to paste into a training."""

from __future__ import annotations

from ..samplers import SAMPLERS, EpochSampler
from ..selectors import SELECTORS, Selector
from .evidence import Finding
from .recommend import Costs, Recommendation

_LOSSES = 'losses = F.cross_entropy(model(x), y, reduction="none")  # or your own, one per sample'


def lines(found: Recommendation, costs: Costs, at: str | None, epochs: float) -> str:
    """What to add or change. Names that are the user's: model, dataset, targets, batch_size,
    loader, epochs, num_classes, and F for torch.nn.functional."""
    if found.kind == "fewer epochs":
        fewer = max(1, round(epochs * (1 - costs.prune_ratio)))
        return f"epochs = {fewer}  # instead of {epochs:g}; let the learning rate end by then, too"
    finding = found.findings[0] if found.kind == "method" else None
    name = "random" if finding is None else finding.selector
    settings = "" if finding is None else _settings(finding)
    if name in SAMPLERS:
        return _before_the_epoch(SAMPLERS[name], settings, costs.prune_ratio)
    kind = SELECTORS[name]
    chosen = f"halfway.selectors.{kind.__name__}({settings})" if settings else f'"{name}"'
    if costs.before_loading and kind.needs == "nothing":
        return _before_loading(kind, chosen, costs.prune_ratio)
    return _in_the_batch(kind, chosen, costs.prune_ratio, at)


def _in_the_batch(kind: type[Selector], chosen: str, prune_ratio: float, at: str | None) -> str:
    cut = f'"{at}"' if kind.needs == "features" else "None"
    ids = kind.wants_ids != "no"
    made = [
        f"blocker = halfway.ForwardBlocker(model, {cut}, prune_ratio={prune_ratio:g}, selector={chosen})",
        "for x, y, ids in loader:  # of halfway.WithIds(dataset)" if ids else "for x, y in loader:",
        f"    x, y = blocker(x, y{', ids=ids' if ids else ''})",
    ]
    return "\n".join([*made, *_step("    ", "blocker.observe(losses)" if kind.wants_losses != "no" else "")])


def _before_loading(kind: type[Selector], chosen: str, prune_ratio: float) -> str:
    targets = ", targets=targets" if kind.wants_targets != "no" else ""
    watches = kind.watches is not Selector.watches
    learns = watches or kind.wants_losses != "no"
    made = [
        f"batches = halfway.PrunedBatchSampler(dataset, batch_size, {prune_ratio:g}, selector={chosen}{targets})",
        f"loader = DataLoader({'halfway.WithIds(dataset)' if learns else 'dataset'}, batch_sampler=batches)",
    ]
    if watches:
        made.append("batches.watch(model)")
    made += ["for epoch in range(epochs):", "    batches.set_epoch(epoch)"]
    made.append("    for x, y, ids in loader:" if learns else "    for x, y in loader:")
    return "\n".join([*made, *_step("        ", "batches.observe(ids, losses)" if learns else "")])


def _before_the_epoch(kind: type[EpochSampler], settings: str, prune_ratio: float) -> str:
    more = f", {settings}" if settings else ""
    data, parts = "dataset", "x, y"
    if kind.reweights:
        data, parts = "halfway.samplers.WithWeights(dataset)", "x, y, ids, weights"
    elif kind.learns:
        data, parts = "halfway.WithIds(dataset)", "x, y, ids"
    made = [
        f"sampler = halfway.samplers.{kind.__name__}(dataset, {prune_ratio:g}{more})",
        f"loader = DataLoader({data}, batch_size, sampler=sampler)",
        "for epoch in range(epochs):",
        "    sampler.set_epoch(epoch)",
        f"    for {parts} in loader:",
    ]
    loss = "(weights * losses).mean()" if kind.reweights else "losses.mean()"
    return "\n".join([*made, *_step("        ", "sampler.observe(ids, losses)" if kind.learns else "", loss)])


def _step(indent: str, observe: str, loss: str = "losses.mean()") -> list[str]:
    """The end of a loop: a method that learns needs a loss per sample, others leave the step as it is."""
    made = [_LOSSES, observe, f"{loss}.backward()  # and the rest of your step"] if observe else ["...  # your step"]
    return [indent + line for line in made]


def _settings(finding: Finding) -> str:
    given = [f"{key}={value!r}" for key, value in finding.settings.items()]
    if "chance" in finding.settings.values():  # the loss of a guess, which depends on how many classes there are
        given.append("num_classes=num_classes")
    return ", ".join(given).replace("'", '"')
