"""Evidence: what is missing is named with where it comes from, and what is wrong is refused."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import METHODS, Evidence, ShortRun
from tests.helpers.evidence import evidence


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_what_it_misses(name):
    method = METHODS[name]()
    empty = Evidence(torch.arange(20) % 2, 2)
    if method.needs == "nothing":
        assert len(method.choose(empty, 0.5)) == 10
        return
    assert empty.missing(method.uses) == list(method.uses)
    with pytest.raises(ValueError, match=rf"{name} needs .*; pass it to `Evidence`, or let `halfway coreset {name} RE"):
        method.choose(empty, 0.5)


def test_a_piece_that_some_short_runs_lack_is_missing():
    labels, norms = torch.arange(4) % 2, torch.ones(4)
    known = Evidence(labels, 2, short_runs=[ShortRun(norms, norms), ShortRun(norms)])
    assert known.missing(["error_norms", "feature_norms", "gradient_norms"]) == ["feature_norms", "gradient_norms"]


def test_evidence_can_be_stored(tmp_path):
    known = evidence()
    torch.save(known.state_dict(), tmp_path / "evidence.pt")
    again = Evidence.of(torch.load(tmp_path / "evidence.pt", weights_only=True))
    for method in METHODS.values():
        assert torch.equal(method().choose(known, 0.5).ids, method().choose(again, 0.5).ids)
    assert again.missing([piece for method in METHODS.values() for piece in method.uses]) == []
    few = Evidence.of(Evidence(known.labels_N, 3).state_dict())
    assert few.features_ND is None
    assert few.dynamics is None


def test_wrong_evidence_is_refused():
    labels = torch.arange(6) % 3
    with pytest.raises(ValueError, match=r"the label 2, with num_classes=2; .*the largest label plus 1"):
        Evidence(labels, 2)
    with pytest.raises(ValueError, match="there are no labels"):
        Evidence(labels[:0], 3)
    with pytest.raises(ValueError, match=r"features_ND must have the shape \(6, D\)"):
        Evidence(labels, 3, torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"logits_NC must have the shape \(6, 3\)"):
        Evidence(labels, 3, logits_NC=torch.zeros(6, 4))
    with pytest.raises(ValueError, match="not finite for 1 samples, for example sample 2: NaN scores would follow"):
        Evidence(labels, 3, logits_NC=torch.zeros(6, 3).index_fill(0, torch.tensor([2]), torch.nan))
    with pytest.raises(ValueError, match="error_norms_N of a short run must have one number for each of the 6"):
        Evidence(labels, 3, short_runs=[ShortRun(torch.zeros(7))])
    with pytest.raises(ValueError, match="the dynamics are of 60 samples"):
        Evidence(labels, 3, dynamics=evidence().dynamics)


def test_a_class_without_samples_matters_only_for_class_balance():
    known = Evidence(torch.tensor([1, 1, 2, 2]), 3)
    with pytest.raises(ValueError, match="class 0; number the classes"):
        METHODS["random_coreset"]().choose(known, 0.5)
    assert len(METHODS["random_coreset"]().choose(known, 0.5, class_balance=False)) == 2
