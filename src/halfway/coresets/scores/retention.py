"""What a run that pruned on the way retained most often."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence

Rule = Literal["most", "least"]


class RetentionRecord(Scored):
    """Retain what an earlier run with another method retained.

    What: the number of times that a sample was retained over the number of times that it was in a batch (or an epoch)
        that was pruned. The largest shares are retained, or the smallest with `rule="least"`.
    Source: ours; users of InfoBatch asked which samples to throw away for good.
    Cost: the run that it is a record of, which need not have been made for this.
    Caveats: a method that retains each sample equally often (random, balanced, rotate) leaves a record of chance. Which
        method it was is in the file: `Coreset.made_from["record"]`.

    Args:
        rule: "most" (default): the samples that were retained most often; "least": those that were pruned.
    """

    name = "retention"
    needs = "retention"
    uses = ("retention",)

    def __init__(self, rule: Rule = "most") -> None:
        if rule not in get_args(Rule):
            raise ValueError(f"unknown rule {rule!r}; choose one of {get_args(Rule)}")
        self.rule = rule

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        assert evidence.offered_N is not None
        assert evidence.retained_N is not None
        never = int((evidence.offered_N <= 0).sum())
        if never:
            raise ValueError(
                f"{never} of {evidence.num_samples} samples were never in a batch that was pruned, so nothing is known "
                "about them; take the record of a run that pruned for at least one whole epoch"
            )
        share_N = evidence.retained_N.double() / evidence.offered_N.double()
        return share_N if self.rule == "most" else -share_N
