"""A model with a live blocker can be copied, pickled and averaged at any moment, and the copies know nothing of it."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from halfway import Density, ForwardBlocker, Schedule

GROUP = "copies of the model"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu())


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_swa(model: nn.Module) -> nn.Module:
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    return averaged.module


def by_timm(model: nn.Module) -> nn.Module:
    timm = pytest.importorskip("timm")
    ema = timm.utils.ModelEmaV3(model)
    ema.update(model)
    return ema.module


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch.save(model)": by_save,
    "AveragedModel": by_swa,
    "timm's ModelEmaV3": by_timm,
}


def assert_clean(copied: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Equal, computes by itself, and nothing in it leads to halfway or to the original."""
    assert copied is not model
    copied.train()
    reference = Net()
    reference.load_state_dict(copied.state_dict())
    torch.testing.assert_close(copied(x), reference(x), rtol=0, atol=0)
    for module in copied.modules():
        for value in vars(module).values():
            assert "halfway" not in type(value).__module__
            if isinstance(value, types.MethodType):
                assert value.__self__ is module
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", ["before", "between the blocker and the model", "after"])
@pytest.mark.parametrize("situation", ["replay", "recompute", "before the window"])
def test_a_copy_does_not_drag_the_blocker_along(way: str, moment: str, situation: str, feature) -> None:
    model = Net()
    schedule = Schedule(5, unit="step") if situation == "before the window" else None
    reuse = "recompute" if situation == "recompute" else "replay"
    blocker = ForwardBlocker(model, "stem", 0.5, selector=Density(num_centroids=4), schedule=schedule, reuse=reuse)
    x = torch.randn(8, 4)
    model(blocker(x)).sum().backward()
    copied = WAYS[way](model) if moment == "before" else None
    retained = blocker(x)
    if copied is None and moment != "after":
        copied = WAYS[way](model)
    model(retained).sum().backward()
    copied = WAYS[way](model) if copied is None else copied
    assert_clean(copied, model, x)
    # The original goes on as if nothing had happened, and the copy can have a blocker of its own.
    model(blocker(x)).sum().backward()
    if situation == "replay":
        assert blocker.stats.steps_replayed == 3
        feature(GROUP, way, blocker.stats)
    ForwardBlocker(copied, "stem", 0.5)


def test_a_patched_forward_is_copied_as_it_is() -> None:
    model = Net()
    model.forward = types.MethodType(lambda self, x: Net.forward(self, x) + 1, model)  # type: ignore[method-assign]
    blocker = ForwardBlocker(model, "stem", 0.5, selector=Density(num_centroids=4))
    x = torch.randn(8, 4)
    retained = blocker(x)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), Net.forward(copied, x) + 1)
    torch.testing.assert_close(model(retained), Net.forward(model, retained) + 1)
