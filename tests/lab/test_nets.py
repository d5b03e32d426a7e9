"""The recipes' networks: what they are, where their weights come from, and that they train."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

import torchvision

from halfway.lab.models import small as nets

# Small enough to train a step in no time, and the least batch that BatchNorm of the ASPP's image pooling takes.
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "small_resnet": ({"width": 4, "blocks": [1, 1, 1, 1]}, 16),
    "small_cnn": ({"width": 4}, 16),
    "speedrun": ({"widths": [6, 8, 8]}, 32),
    "bottleneck_resnet": ({"width": 4, "blocks": [1, 1, 1, 1]}, 32),
    "small_swin": ({"width": 32, "depths": [1, 1, 1, 1]}, 32),
    "deeplabv3_resnet50": ({}, 32),
    "small_deeplabv3": ({"width": 4, "blocks": [1, 1, 1, 1], "head_width": 8}, 32),
}


def build(name: str, classes: int = 5, seed: int = 0, weights: str | None = None, **options: Any) -> nn.Module:
    return nets.build(name, classes, options, weights, seed)


def small(name: str, **more: Any) -> nn.Module:
    return build(name, **SMALL[name][0], **more)


def saved(state: Any, path: Path) -> str:
    torch.save(state, path)
    return str(path)


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- what they are


def test_the_default_small_resnet_is_the_resnet_18_of_the_cifar_literature() -> None:
    assert parameters(build("small_resnet", 10)) == 11_173_962
    assert parameters(build("small_resnet", 100)) == 11_173_962 + 90 * 513


def test_the_small_resnet_is_torchvision_s_with_another_stem() -> None:
    mine = build("small_resnet", 7)
    theirs = torchvision.models.resnet18(num_classes=7)
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(mine.eval()(x), theirs.eval()(x))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in mine.named_children():
        layer.register_forward_hook(lambda m, a, out, name=name: shapes.update({name: tuple(out.shape[1:])}))
    mine(torch.randn(1, 3, 32, 32))
    assert [shapes[f"layer{i}"] for i in range(1, 5)] == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_the_bottleneck_resnet_in_full_width_is_torchvision_s_resnet_50_with_another_stem() -> None:
    mine = build("bottleneck_resnet", 7, width=64, blocks=[3, 4, 6, 3])
    theirs = torchvision.models.resnet50(num_classes=7)
    theirs.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    theirs.load_state_dict(mine.state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(mine.eval()(x), theirs.eval()(x))


def test_the_small_deeplab_has_output_stride_8_and_feeds_its_auxiliary_head_from_stage_3() -> None:
    model = small("small_deeplabv3").eval()
    seen: dict[str, Tensor] = {}
    model.backbone.layer3.register_forward_hook(lambda m, a, out: seen.update(stage3=out))
    model.backbone.layer4.register_forward_hook(lambda m, a, out: seen.update(stage4=out))
    model.aux_classifier.register_forward_pre_hook(lambda m, a: seen.update(aux=a[0]))
    model.classifier.register_forward_pre_hook(lambda m, a: seen.update(out=a[0]))
    outputs = model(torch.randn(2, 3, 48, 80))
    assert torch.equal(seen["aux"], seen["stage3"])
    assert torch.equal(seen["out"], seen["stage4"])
    assert seen["stage3"].shape[-2:] == seen["stage4"].shape[-2:] == (6, 10)
    assert {name: tuple(out.shape) for name, out in outputs.items()} == {"out": (2, 5, 48, 80), "aux": (2, 5, 48, 80)}


def test_both_deeplabs_have_an_auxiliary_head() -> None:
    with torch.device("meta"):
        model = build("deeplabv3_resnet50", 21)
        outputs = model(torch.empty(2, 3, 64, 64))
    assert {name: tuple(out.shape) for name, out in outputs.items()} == {
        "out": (2, 21, 64, 64),
        "aux": (2, 21, 64, 64),
    }


@pytest.mark.parametrize("name", SMALL)
def test_every_net_trains_a_step_and_all_of_it(name: str) -> None:
    assert set(SMALL) == set(nets.NETS)
    size = SMALL[name][1]
    model = small(name).train()
    if name == "small_swin":
        for module in model.modules():
            if type(module).__name__ == "StochasticDepth":
                module.p = 0.0  # or it may leave out the whole of a block
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x = torch.randn(2, 3, size, size)
    # Behind a convolution that is still an identity, BatchNorm undoes the scales of the one before: no gradient yet.
    for _ in range(2 if name == "speedrun" else 1):
        optimizer.zero_grad()
        outputs = model(x)
        logits = [outputs] if isinstance(outputs, Tensor) else list(outputs.values())
        loss = sum(nn.functional.cross_entropy(out, torch.randint(5, (2, *out.shape[2:]))) for out in logits)
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)
    idle = [k for k, p in model.named_parameters() if torch.equal(p, before[k])]
    assert idle == []
    with torch.no_grad():
        again = model(x)
    assert not torch.equal(again if isinstance(again, Tensor) else again["out"], logits[0])


# ------------------------------------------------------------------------ seeds


@pytest.mark.parametrize("name", ["small_resnet", "small_swin", "small_deeplabv3", "mobilenet_v3_small"])
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    options = SMALL.get(name, ({}, 0))[0]
    before = torch.random.get_rng_state()
    first = build(name, seed=3, **options)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is not touched"
    torch.rand(7)
    assert same(build(name, seed=3, **options), first)
    assert not same(build(name, seed=4, **options), first)


def test_other_devices_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (torch.cuda, torch.mps, torch.xpu):
        for name in ("manual_seed", "manual_seed_all"):
            monkeypatch.setattr(device, name, lambda seed: pytest.fail("seeded"), raising=False)
    small("small_resnet", seed=3)


# --------------------------------------------------------------------- any model


def test_models_of_torchvision_and_timm_get_the_classes_and_options() -> None:
    timm = pytest.importorskip("timm")
    theirs = nets.build("swin_t", 6, {"dropout": 0.125}, None, 0)
    assert isinstance(theirs, torchvision.models.SwinTransformer)
    assert theirs.head.out_features == 6
    assert 0.125 in {m.p for m in theirs.modules() if isinstance(m, nn.Dropout)}
    model = nets.build("vit_tiny_patch16_224", 6, {"depth": 2}, None, 0, size=32)
    assert isinstance(model, timm.models.vision_transformer.VisionTransformer)
    assert len(model.blocks) == 2
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 6)


def test_a_factory_of_one_s_own_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
    (tmp_path / "my_own_net.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    model = nets.build("my_own_net:net", 99, {}, None, 1)
    assert model(torch.randn(2, 3, 2, 2)).shape == (2, 3)
    assert same(model, nets.build("my_own_net:net", 99, {}, None, 1))
    assert not same(model, nets.build("my_own_net:net", 99, {}, None, 2))
    with pytest.raises(ValueError, match=r"my_own_net:net is called without arguments; it cannot take model\.options"):
        nets.build("my_own_net:net", 99, {"width": 3}, None, 1)


def test_an_unknown_model_or_option_is_named() -> None:
    with pytest.raises(ValueError, match="small_resnet has no option 'widht'; did you mean width"):
        build("small_resnet", widht=8)
    with pytest.raises(ValueError, match="deeplabv3_resnet50 has no option 'width'; there are none"):
        build("deeplabv3_resnet50", width=8)
    with pytest.raises(ValueError, match="no model 'resnet5O'; the closest are"):
        build("resnet5O")


# ----------------------------------------------------------------------- weights


def test_an_encoder_s_weights_go_into_the_backbone_and_the_heads_are_left_alone(tmp_path: Path) -> None:
    encoder = torchvision.models.resnet50(num_classes=11)
    with torch.no_grad():
        for buffer in encoder.buffers():
            buffer.add_(1)
    model = build("deeplabv3_resnet50", weights=saved(encoder.state_dict(), tmp_path / "resnet50.pt"))
    untouched = build("deeplabv3_resnet50")
    loaded, own, before = encoder.state_dict(), model.state_dict(), untouched.state_dict()
    for key, value in own.items():
        part, _, rest = key.partition(".")
        assert torch.equal(value, loaded[rest] if part == "backbone" else before[key]), key
    assert sum(k.startswith("backbone.") for k in own) == len(loaded) - 2


def test_a_whole_model_s_weights_go_into_the_whole_model(tmp_path: Path) -> None:
    first = small("small_deeplabv3", seed=1)
    path = saved(first.state_dict(), tmp_path / "deeplab.pt")
    assert same(small("small_deeplabv3", seed=2, weights=path), first)


def test_a_classifier_of_other_classes_keeps_its_own_weights(tmp_path: Path) -> None:
    first = small("small_resnet", seed=1)
    path = saved(first.state_dict(), tmp_path / "five.pt")
    second, fresh = small("small_resnet", classes=8, seed=2, weights=path), small("small_resnet", classes=8, seed=2)
    for key, value in second.state_dict().items():
        assert torch.equal(value, (fresh if key.startswith("fc.") else first).state_dict()[key]), key


def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.weights='nowhere\.pt' is not a file"):
        small("small_resnet", weights="nowhere.pt")
    other = saved(small("bottleneck_resnet").state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt does not fit the model: \d+ of its \d+ tensors .* 'layer1\.0"):
        small("small_resnet", weights=other)
    wider = saved(build("small_resnet", width=8, blocks=[1, 1, 1, 1]).state_dict(), tmp_path / "wider.pt")
    with pytest.raises(ValueError, match=r"wider\.pt does not fit .* for example 'conv1\.weight'"):
        small("small_resnet", weights=wider)
    text = tmp_path / "text.pt"
    text.write_text("hello")
    with pytest.raises(ValueError, match=r"text\.pt is not a state dict saved by torch\.save"):
        small("small_resnet", weights=str(text))
    with pytest.raises(ValueError, match=r"list\.pt holds a list, not a state dict"):
        small("small_resnet", weights=saved([1, 2], tmp_path / "list.pt"))
