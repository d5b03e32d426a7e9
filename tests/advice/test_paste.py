"""Lines to paste: they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import halfway
from halfway.advice.paste import lines
from halfway.advice.recommend import Costs, Recommendation

from .invented import method, net

WINS = (0.9, 0.4, 1.4)
DATA = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("early_exit", {"pick": "hard"}),
    ("density", {}),
    ("last_loss_hard", {}),
    ("last_loss_proportional", {"cap": "chance"}),
    ("order_dp", {}),
    ("balanced_remembered", {}),
    ("divbs", {}),
    ("auto", {}),
    ("infobatch", {"threshold": 0.95}),
    ("rs2", {}),
]
BEFORE_LOADING = ("last_loss_hard", "last_loss_proportional", "order_dp", "balanced_remembered", "auto")


def pasted(text: str) -> dict[str, Any]:
    """Run the lines as they are, where the names are that a training has."""
    names: dict[str, Any] = {
        "halfway": halfway,
        "DataLoader": DataLoader,
        "F": F,
        "model": net(),
        "dataset": DATA,
        "targets": DATA.tensors[1],
        "batch_size": 8,
        "num_classes": 3,
        "epochs": 1,
        "loader": DataLoader(halfway.WithIds(DATA) if "of halfway.WithIds(dataset)" in text else DATA, 8),
    }
    exec(text, names)
    return names


def retained(names: dict[str, Any]) -> int:
    """How many of the 32 samples an epoch retains."""
    if "blocker" not in names:
        return sum(len(batch[0]) for batch in names["loader"])
    names["blocker"].remove()
    return 4 * len(names["x"])  # of the last of four batches


# Where the step is the user's, the lines do not call the model.
@pytest.mark.filterwarnings("ignore:halfway computes the shallow layers twice")
@pytest.mark.parametrize("waiting", [0.0, 0.5])
@pytest.mark.parametrize(("name", "settings"), METHODS)
def test_the_lines_of_a_method_run_and_prune(name: str, settings: dict[str, Any], waiting: float) -> None:
    found = Recommendation("method", "", (), (method(name, WINS, settings=settings),))
    text = lines(found, Costs(0.5, 0.55, 0.65, waiting), "0", 10)
    for key, value in settings.items():
        assert f"{key}={value}".replace("=chance", '="chance"').replace("=hard", '="hard"') in text
    assert ("PrunedBatchSampler" in text) == (waiting > 0 and name in BEFORE_LOADING)
    names = pasted(text)
    if name != "infobatch":  # it begins when it knows losses
        assert retained(names) == 16
    learns = any(p.grad is not None for p in names["model"].parameters())
    assert learns == ("observe" in text)
    assert learns != ("...  # your step" in text)


@pytest.mark.parametrize("kind", ["random", "no evidence"])
@pytest.mark.parametrize("waiting", [0.0, 0.5])
def test_the_lines_of_random_pruning_run_and_prune(kind: Any, waiting: float) -> None:
    names = pasted(lines(Recommendation(kind, ""), Costs(0.25, 0.8, None, waiting), None, 10))
    assert retained(names) == 24


def test_fewer_epochs_are_at_least_one() -> None:
    names: dict[str, Any] = {}
    exec(lines(Recommendation("fewer epochs", ""), Costs(0.7, 0.4), None, 1), names)
    assert names["epochs"] == 1
    exec(lines(Recommendation("fewer epochs", ""), Costs(0.25, 0.8), None, 90), names)
    assert names["epochs"] == 68
