"""The subset file: all or nothing, and only for the data set that it was made from."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from halfway.coresets import Coreset, make
from tests.helpers.evidence import evidence


@pytest.fixture
def found():
    return make("craig").choose(evidence(), 0.5, seed=3)


def test_a_file_holds_what_was_chosen(found, tmp_path):
    found = dataclasses.replace(found, made_from={"recipe": "x", "epochs": 3}, cost={"flops": 1.5e9})
    path = tmp_path / "deep" / "subset.pt"
    found.save(path)
    again = Coreset.load(path, evidence().labels_N)
    for part in dataclasses.fields(Coreset):
        mine, theirs = getattr(found, part.name), getattr(again, part.name)
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    assert again.settings == {"block": 8192, "keep": 0.5, "class_balance": True, "seed": 3}
    assert [p.name for p in path.parent.iterdir()] == ["subset.pt"]
    assert isinstance(torch.load(path, weights_only=True), dict)


def test_scores_come_along_where_there_are_any():
    known = evidence()
    found = make("el2n").choose(known, 0.5)
    assert torch.equal(found.scores, make("el2n").score(known))


def test_a_plain_subset_comes_out(found):
    labels = evidence().labels_N
    data = TensorDataset(torch.arange(60), labels)
    part = found.of(data, labels)
    assert type(part) is Subset
    assert [int(part[i][0]) for i in range(len(part))] == found.ids.tolist()
    assert len(part) == len(found) == 30


def test_another_data_set_is_refused(found, tmp_path):
    labels = evidence().labels_N
    swapped = labels.clone()
    swapped[:2] = swapped[:2].flip(0) if swapped[0] != swapped[1] else 1 - swapped[:2].clamp(max=1)
    found.save(tmp_path / "subset.pt")
    with pytest.raises(ValueError, match=r"other labels, or the same in another order.*craig.*`halfway coreset METHOD"):
        Coreset.load(tmp_path / "subset.pt", swapped)
    with pytest.raises(ValueError, match="has 59 samples, the subset is of 60"):
        Coreset.load(tmp_path / "subset.pt", labels[:59])
    with pytest.raises(ValueError, match="has 59 samples, the subset is of 60"):
        found.of(TensorDataset(torch.arange(59)))
    with pytest.raises(ValueError, match="other labels"):
        found.of(TensorDataset(torch.arange(60)), swapped)


def test_the_fingerprint_does_not_depend_on_the_kind_of_number_or_the_machine():
    labels = torch.tensor([3, 1, 2])
    assert Coreset.fingerprint_of(labels) == Coreset.fingerprint_of(labels.to(torch.uint8))
    assert Coreset.fingerprint_of(labels) == f"3:{hashlib.sha256(struct.pack('<3q', 3, 1, 2)).hexdigest()[:32]}"


def test_what_is_no_subset_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no subset file .*halfway coreset METHOD"):
        Coreset.load(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("nonsense")
    with pytest.raises(ValueError, match="is not a subset file"):
        Coreset.load(tmp_path / "text.pt")
    torch.save({"losses": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a subset file"):
        Coreset.load(tmp_path / "other.pt")


@pytest.mark.parametrize("ids", [[3, 1], [1, 1], [-1, 2], [2, 60]])
def test_ids_that_are_none_of_a_data_set_are_refused(found, tmp_path, ids):
    dataclasses.replace(found, ids=torch.tensor(ids)).save(tmp_path / "ids.pt")
    with pytest.raises(ValueError, match="does not hold ids in order, each once, of a data set"):
        Coreset.load(tmp_path / "ids.pt")
    content = torch.load(tmp_path / "ids.pt", weights_only=True)
    torch.save({**content, "surprise": 1}, tmp_path / "ids.pt")
    with pytest.raises(ValueError, match="not a subset file of this halfway"):
        Coreset.load(tmp_path / "ids.pt")


WRONG = {
    "ids that are no numbers": ({"ids": [1, 2]}, "whole numbers as ids"),
    "float ids": ({"ids": torch.arange(3.0)}, "whole numbers as ids"),
    "ids in two rows": ({"ids": torch.arange(4).view(2, 2)}, "whole numbers as ids"),
    "no ids": ({"ids": torch.arange(0)}, "ids in order"),
    "one weight too many": ({"weights": torch.ones(31)}, "one finite weight for each of its 30 samples"),
    "weights in two rows": ({"weights": torch.ones(30, 2)}, "one finite weight"),
    "a weight of NaN": ({"weights": torch.full((30,), torch.nan)}, "one finite weight"),
    "few scores": ({"scores": torch.zeros(59)}, "one score for each of the 60 samples"),
    "a score of NaN": ({"scores": torch.full((60,), torch.nan)}, "without NaN"),
    "no settings": ({"settings": None}, "settings, made_from and cost as dicts"),
    "no keep": ({"settings": {"seed": 0, "class_balance": True}}, "the settings keep and seed"),
    "a keep of text": ({"settings": {"keep": "half", "seed": 0, "class_balance": True}}, "the share that it keeps"),
    "no method": ({"method": None}, "a method"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_holds_something_else_is_one_clear_error(found, tmp_path, what):
    change, message = WRONG[what]
    torch.save({"format": "halfway coreset 1", **vars(found), **change}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=rf"s.pt does not hold .*{message}.*`halfway coreset METHOD"):
        Coreset.load(tmp_path / "s.pt")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(found, tmp_path, monkeypatch):
    path = tmp_path / "subset.pt"
    found.save(path)
    before = path.read_bytes()

    def half(content, file):
        file.write(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="full"):
        found.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["subset.pt"]
