"""RHO-Loss by the last known loss: what exceeded its irreducible loss stays, by id."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.selectors import Rho, RhoRemembered
from halfway.selectors.tools.draw import gumbel
from tests.helpers.draws import generator, within
from tests.helpers.remembered import NAN, candidates, frequencies, through_a_file

IRREDUCIBLE = torch.tensor([0.5, 4.0, 0.1, 1.0, 0.2, 0.0])
LAST = torch.tensor([1.0, 4.5, 2.0, 0.5, NAN, NAN])


def knowing(**settings):
    selector = RhoRemembered(IRREDUCIBLE, **settings)
    selector.observe(candidates(torch.arange(6)), torch.arange(4), LAST[:4])
    return selector


def test_the_last_loss_minus_the_irreducible_one_decides():
    selector = knowing()
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "required")
    ids = torch.tensor([3, 1, 2, 0])
    found = selector.select(candidates(ids), 2)
    # 0.5 - 1.0, 4.5 - 4.0, 2.0 - 0.1, 1.0 - 0.5; the largest loss is not preferred, it stays large whatever one does.
    assert found.importance.tolist() == pytest.approx([-0.5, 0.5, 1.9, 0.5], abs=1e-6)
    assert 2 in found.indices.tolist()
    assert 0 not in found.indices.tolist()
    selector.observe(candidates(ids), torch.tensor([0]), torch.tensor([7.0]))  # what was reported last counts
    assert selector.select(candidates(ids), 1).indices.tolist() == [0]


def test_the_unknown_have_the_mean_of_what_the_others_exceed_theirs_by():
    found = knowing().select(candidates(torch.arange(6)), 3).importance.tolist()
    mean = (0.5 + 0.5 + 1.9 - 0.5) / 4
    assert found == pytest.approx([0.5, 0.5, 1.9, -0.5, mean, mean], abs=1e-6)
    alone, _ = frequencies(knowing(), torch.arange(6), 2, 600, generator(0))
    assert alone[:4].tolist() == [0, 0, 1, 0]
    assert all(within(f, 0.5, 600) for f in alone[4:].tolist())


def test_before_anything_is_known_the_choice_is_random():
    selector = RhoRemembered(IRREDUCIBLE)
    alone, _ = frequencies(selector, torch.arange(6), 2, 1000, generator(0))
    assert all(within(f, 1 / 3, 1000) for f in alone.tolist())


def test_with_a_temperature_samples_are_drawn_by_the_standardised_difference():
    found = knowing(temperature=0.5).importance(candidates(torch.arange(6), 3)) - gumbel(torch.zeros(6), generator(3))
    excess = [0.5, 0.5, 1.9, -0.5]
    mean = sum(excess) / 4
    sd = math.sqrt(sum((v - mean) ** 2 for v in excess) / 4)
    assert found.tolist() == pytest.approx([*((v - mean) / sd / 0.5 for v in excess), 0.0, 0.0], abs=1e-5)


def test_the_control_prefers_small_irreducible_losses_and_learns_nothing():
    selector = RhoRemembered(IRREDUCIBLE, use_loss=False)
    assert (selector.wants_losses, selector.state_dict()) == ("no", {})
    selector.observe(candidates(torch.arange(6)), None, torch.rand(6))
    found = selector.select(candidates(torch.arange(6)), 3)
    assert found.importance.tolist() == pytest.approx((-IRREDUCIBLE).tolist(), abs=1e-6)
    assert found.indices.tolist() == [2, 4, 5]


def test_it_reads_the_file_that_rho_reads(tmp_path):
    torch.save({"losses": IRREDUCIBLE, "recipe": "tiny-cifar10"}, tmp_path / "losses.pt")
    ids = torch.tensor([3, 1, 2])
    found = [RhoRemembered(source) for source in (tmp_path / "losses.pt", str(tmp_path / "losses.pt"), IRREDUCIBLE)]
    for selector in found:
        selector.observe(candidates(ids), None, torch.ones(3))
        importance = selector.select(candidates(ids), 1).importance
        assert importance.tolist() == pytest.approx((1 - IRREDUCIBLE[ids]).tolist(), abs=1e-6)
        assert selector.config() == found[-1].config()
    assert found[0].config()["losses"] == Rho(IRREDUCIBLE).config()["losses"]
    assert RhoRemembered(IRREDUCIBLE + 0.01).config() != found[0].config()


def test_the_state_is_the_last_losses_of_all_samples():
    first, second = knowing(), RhoRemembered(IRREDUCIBLE)
    shapes = {name: value.shape for name, value in second.state_dict().items()}
    state = through_a_file(first.state_dict())
    assert shapes == {name: value.shape for name, value in state.items()} == {"losses": (6, 1)}
    second.load_state_dict(state)
    a, b = (selector.select(candidates(torch.arange(6)), 3) for selector in (first, second))
    assert torch.equal(a.indices, b.indices)
    with pytest.raises(ValueError, match="remembers 6 samples, here are 5"):
        RhoRemembered(IRREDUCIBLE[:5]).load_state_dict(state)


def test_mistakes_are_named(tmp_path):
    command = "halfway train RECIPE --method full data.holdout=true --save-losses FILE"
    with pytest.raises(ValueError, match=f"'rho_remembered'.*losses='FILE'.*{command}"):
        RhoRemembered()
    with pytest.raises(FileNotFoundError, match=f"missing.pt.*{command}"):
        RhoRemembered(tmp_path / "missing.pt")
    with pytest.raises(ValueError, match="temperature must not be negative"):
        RhoRemembered(IRREDUCIBLE, temperature=-1.0)
    with pytest.raises(ValueError, match=r"6 samples, ids 0 to 5.*the data set you train on"):
        knowing().select(candidates(torch.tensor([1, 6])), 1)


def test_an_id_out_of_range_on_the_device_is_reported_by_check(monkeypatch):
    monkeypatch.setattr("halfway.state.sample_memory._on_host", lambda ids: False)
    selector = knowing()
    assert len(selector.select(candidates(torch.tensor([0, 6, 1])), 2).indices) == 2
    with pytest.raises(ValueError, match="6 samples, ids 0 to 5"):
        selector.check()
