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
    ("infobatch", {"threshold": 0.95}),
    ("rs2", {}),
]


def pasted(text: str) -> dict[str, Any]:
    """Run the lines in a loop of the user's."""
    model = net()
    names: dict[str, Any] = {
        "halfway": halfway,
        "DataLoader": DataLoader,
        "model": model,
        "dataset": DATA,
        "targets": DATA.tensors[1],
        "batch_size": 8,
        "num_classes": 3,
        "loader": DataLoader(halfway.WithIds(DATA) if "ids in loader" in text else DATA, 8),
    }
    names |= {"epochs": 1, "F": F, "seen": []}
    body, deep = [], " " * (len(text.splitlines()[-1]) - len(text.splitlines()[-1].lstrip()))
    loss = f"{deep}losses = F.cross_entropy(model(x), y, reduction='none')"
    for line in text.splitlines():
        body += [loss, line] if "observe" in line else [line]
    body += [] if loss in body else [loss]
    body += [f"{deep}losses.mean().backward()", f"{deep}seen.append(len(x))"]
    exec("\n".join(body), names)
    return names


@pytest.mark.parametrize("waiting", [0.0, 0.5])
@pytest.mark.parametrize(("name", "settings"), METHODS)
def test_the_lines_of_a_method_run_and_prune(name: str, settings: dict[str, Any], waiting: float) -> None:
    found = Recommendation("method", "", (), (method(name, WINS, settings=settings),))
    text = lines(found, Costs(0.5, 0.55, 0.65, waiting), "0", 10)
    for key, value in settings.items():
        assert f"{key}={value}".replace("=chance", '="chance"').replace("=hard", '="hard"') in text
    before_loading = "PrunedBatchSampler" in text
    assert before_loading == (
        waiting > 0 and name in ("last_loss_hard", "last_loss_proportional", "order_dp", "balanced_remembered")
    )
    names = pasted(text)
    if "blocker" in names:
        names["blocker"].remove()
    if name != "infobatch":  # it begins when it knows losses
        assert sum(names["seen"]) == 16


@pytest.mark.parametrize("kind", ["random", "no evidence"])
@pytest.mark.parametrize("waiting", [0.0, 0.5])
def test_the_lines_of_random_pruning_run_and_prune(kind: Any, waiting: float) -> None:
    names = pasted(lines(Recommendation(kind, ""), Costs(0.25, 0.8, None, waiting), None, 10))
    assert names["seen"] == [6, 6, 6, 6]
    if "blocker" in names:
        names["blocker"].remove()


def test_fewer_epochs_are_at_least_one() -> None:
    names: dict[str, Any] = {}
    exec(lines(Recommendation("fewer epochs", ""), Costs(0.7, 0.4), None, 1), names)
    assert names["epochs"] == 1
    exec(lines(Recommendation("fewer epochs", ""), Costs(0.25, 0.8), None, 90), names)
    assert names["epochs"] == 68
