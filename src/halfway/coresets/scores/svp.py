"""Selection via proxy: the least certain predictions of a small model."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence

Measure = Literal["least_confidence", "entropy", "margin"]


class SVP(Scored):
    """Retain what a small proxy is least certain about, whatever the labels say.

    What: with p the softmax of the proxy's logits and p1 >= p2 its two largest values, the largest 1 - p1
        ("least_confidence"), the largest entropy -sum_c p_c log p_c, or the smallest p1 - p2 ("margin") are retained.
    Source: Coleman et al., "Selection via Proxy: Efficient Data Selection for Deep Learning", ICLR 2020.
    Cost: a whole training of a smaller network, and one forward pass of it over all samples.
    Caveats: confident errors, wrong labels among them, are pruned first. Public code has the order reversed.

    Args:
        measure: "least_confidence" (default), "entropy" or "margin".
    """

    name = "svp"
    needs = "small run"
    uses = ("logits_NC",)

    def __init__(self, measure: Measure = "least_confidence") -> None:
        if measure not in get_args(Measure):
            raise ValueError(f"unknown measure {measure!r}; choose one of {get_args(Measure)}")
        self.measure = measure

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        assert evidence.logits_NC is not None
        p_NC = evidence.logits_NC.to(torch.promote_types(evidence.logits_NC.dtype, torch.float32)).softmax(1)
        if self.measure == "entropy":
            return torch.special.entr(p_NC).sum(1)
        # 1 - p1 as the sum of the others, which is exact even where p1 rounds to 1.
        others_NC = p_NC.scatter(1, p_NC.argmax(1, keepdim=True), 0.0)
        doubt_N = others_NC.sum(1)
        return doubt_N if self.measure == "least_confidence" else doubt_N + others_NC.amax(1)
