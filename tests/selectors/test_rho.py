"""RHO-Loss: what exceeds its irreducible loss stays; where those losses come from, and what is wrong with them."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.selectors.rho import Rho
from tests.helpers.classified import (
    as_losses,
    candidates,
)


def test_rho_retains_what_exceeds_its_irreducible_loss():
    losses, irreducible = torch.tensor([5.0, 1.0, 3.0, 0.2]), torch.tensor([9.0, 0.1, 4.9, 9.0, 0.1, 0.1])
    ids = torch.tensor([2, 4, 1, 5])
    found = Rho(irreducible, loss_fn=as_losses).select(candidates(losses, ids=ids), 2)
    assert found.importance.tolist() == pytest.approx([0.1, 0.9, 2.9, 0.1])
    assert found.indices.tolist() == [1, 2]  # not the largest loss: it stays large whatever one does


def test_rho_reads_the_file_that_training_writes(tmp_path):
    irreducible = torch.rand(8)
    torch.save({"losses": irreducible, "recipe": "tiny-cifar10"}, tmp_path / "losses.pt")
    for source in (tmp_path / "losses.pt", str(tmp_path / "losses.pt"), irreducible):
        selector = Rho(source, loss_fn=as_losses)
        found = selector.importance(candidates(torch.ones(3), ids=torch.tensor([7, 0, 3])))
        assert torch.equal(found, 1 - irreducible[[7, 0, 3]])
        assert selector.config() == Rho(irreducible, loss_fn=as_losses).config()
    assert Rho(irreducible + 0.01, loss_fn=as_losses).config() != selector.config()
    assert Rho.wants_ids == "required"


def test_rho_says_how_to_get_the_losses(tmp_path):
    command = "halfway train RECIPE --method full data.holdout=true --save-losses FILE"
    with pytest.raises(ValueError, match=command):
        Rho()
    with pytest.raises(FileNotFoundError, match=f"missing.pt.*{command}"):
        Rho(tmp_path / "missing.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match=f"text.pt is not a file of losses.*{command}"):
        Rho(tmp_path / "text.pt")
    torch.save({"losses": torch.rand(3), "code": tmp_path}, tmp_path / "code.pt")  # more than tensors and plain values
    with pytest.raises(ValueError, match=r"code\.pt is not a file"):
        Rho(tmp_path / "code.pt")
    torch.save({"weights": torch.rand(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"'losses'.*{command}"):
        Rho(tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"\(N,\)"):
        Rho(torch.rand(3, 2))
    with pytest.raises(ValueError, match=r"\(N,\)"):
        Rho(torch.arange(3))
    with pytest.raises(ValueError, match="for 2 of 4 samples, for example for id 1"):
        Rho(torch.tensor([0.0, math.nan, 1.0, math.inf]))


def test_rho_for_another_data_set_is_an_error():
    selector = Rho(torch.rand(5), loss_fn=as_losses)
    with pytest.raises(ValueError, match=r"5 samples, ids 0 to 4.*the data set you train on"):
        selector.select(candidates(torch.ones(2), ids=torch.tensor([1, 5])), 1)
