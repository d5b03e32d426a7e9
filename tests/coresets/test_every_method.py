"""What holds for every method."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import METHODS, Greedy, Scored, make
from halfway.samplers import SAMPLERS
from halfway.selectors import SELECTORS
from tests.helpers.evidence import evidence

# Methods that draw something which no rule decides; the others depend on the seed only where scores are equal.
DRAWN = {"random_coreset", "k_center", "ccs", "glister"}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("keep", [0.3, 0.5, 0.7])
def test_exactly_the_share_of_every_class_is_retained(name, keep):
    known = evidence()
    found = make(name).choose(known, keep, seed=1)
    assert found.ids.tolist() == sorted(set(found.ids.tolist()))
    assert torch.bincount(known.labels_N[found.ids]).tolist() == [round(keep * 20)] * 3
    assert found.ids.dtype == torch.int64
    assert found.method == name


@pytest.mark.parametrize("name", METHODS)
def test_the_seed_decides_and_nothing_else_is_drawn(name):
    known, before = evidence(num_samples=90), torch.get_rng_state()
    found = [make(name).choose(known, 0.5, seed=seed).ids.tolist() for seed in (0, 0, 1)]
    assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1]
    if name in DRAWN:
        assert found[0] != found[2]


@pytest.mark.parametrize("name", METHODS)
def test_evidence_is_left_as_it_was(name):
    known, untouched = evidence(), evidence()
    make(name).choose(known, 0.5)
    assert torch.equal(known.features_ND, untouched.features_ND)
    assert torch.equal(known.logits_NC, untouched.logits_NC)
    assert torch.equal(known.labels_N, untouched.labels_N)


@pytest.mark.parametrize("name", METHODS)
def test_half_precision_will_do(name):
    known = evidence()
    small = evidence()
    small.features_ND, small.logits_NC = known.features_ND.half(), known.logits_NC.half()
    assert len(make(name).choose(small, 0.5)) == 30


@pytest.mark.parametrize("name", METHODS)
def test_class_balance_can_be_turned_off_where_samples_are_scored(name):
    known, method = evidence(), make(name)
    if isinstance(method, Greedy) and method.per_class:
        with pytest.raises(ValueError, match=r"chooses within each class.*leave class_balance=True"):
            method.choose(known, 0.5, class_balance=False)
    else:
        assert len(method.choose(known, 0.5, class_balance=False)) == 30
    if isinstance(method, Scored) and name != "random_coreset":
        scores = method.score(known)
        found = method.choose(known, 0.5, class_balance=False).ids
        left = torch.ones(60, dtype=torch.bool).index_fill(0, found, False)
        assert scores[found].min() >= scores[left].max()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("keep", [0.0, 1.0, 1.2])
def test_a_wrong_share_is_refused(name, keep):
    with pytest.raises(ValueError, match="between 0 and 1"):
        make(name).choose(evidence(), keep)


def test_scores_of_the_wrong_length_are_refused():
    class Short(Scored):
        name, needs, uses = "short", "nothing", ()

        def score(self, evidence, generator=None):
            return torch.zeros(evidence.num_samples - 1)

    with pytest.raises(ValueError, match="short gave 59 scores for 60 samples; let `score` return one of each"):
        Short().choose(evidence(), 0.5)


def test_errors_about_classes_name_the_switch_of_the_command_as_well():
    known = evidence()
    with pytest.raises(ValueError, match=r"leave class_balance=True \(drop --no-class-balance\)"):
        make("herding").choose(known, 0.5, class_balance=False)
    known.labels_N.clamp_(max=1)
    for name in ("el2n", "herding"):  # herding could not do without balance either, so the fix names other methods
        with pytest.raises(ValueError, match=r"--no-class-balance`\) with a method that scores samples"):
            make(name).choose(known, 0.5)


def test_names_are_unique_among_all_methods():
    assert set(METHODS).isdisjoint(SELECTORS)
    assert set(METHODS).isdisjoint(SAMPLERS)
    with pytest.raises(ValueError, match="did you mean forgetting"):
        make("forgeting")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("svp", {"measure": "loss"}),
        ("k_center", {"start": "first"}),
        ("ccs", {"by": "loss"}),
        ("ccs", {"beta": "mnist"}),
        ("ccs", {"beta": 1.0}),
        ("ccs", {"bins": 0}),
        ("craig", {"block": 0}),
        ("glister", {"validation": 0}),
        ("glister", {"every": 2}),
        ("glister", {"lr": 0}),
        ("influence", {"damping": 0}),
        ("dataset_pruning", {"dim": 0}),
        ("retention", {"rule": "all"}),
    ],
)
def test_wrong_settings_are_refused(name, settings):
    with pytest.raises(ValueError, match=r"choose one of|must be|share"):
        make(name, **settings)
