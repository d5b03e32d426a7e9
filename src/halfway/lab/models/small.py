"""The recipes' networks, in any width: torchvision's blocks put together for small images and small machines.

`build` knows them by name, and everything `by_name.build` knows: torchvision's, timm's, or `package.module:factory`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import did_you_mean
from . import by_name as models
from .speedrun import speedrun


def small_resnet(classes: int, width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2)) -> nn.Module:
    """The CIFAR variant of ResNet: a 3 x 3 stem without pooling, then basic blocks.

    With the defaults it is the ResNet-18 that the literature trains on CIFAR (11.2 million parameters, 10 classes).
    """
    from torchvision.models.resnet import BasicBlock

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, width, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(width), relu=nn.ReLU()
    )
    channels = width
    for i, count in enumerate(blocks):
        layers[f"layer{i + 1}"] = _stage(BasicBlock, channels, width * 2**i, count, stride=1 if i == 0 else 2)
        channels = width * 2**i
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, classes))
    return _initialised(nn.Sequential(layers))


def small_cnn(classes: int, width: int = 8) -> nn.Module:
    """Four 3 x 3 convolutions, each twice as wide as the one before; the first three halve the resolution."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for i in range(4):
        out = width * 2**i
        shrink = [] if i == 3 else [nn.MaxPool2d(2)]
        conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        layers[f"layer{i + 1}"] = nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU(), *shrink)
        channels = out
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, classes))
    return _initialised(nn.Sequential(layers))


def bottleneck_resnet(classes: int, width: int = 16, blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 in another width, and with half the strides in its stem: for images of 64 px."""
    layers = _bottleneck_encoder(width, blocks, strides=(1, 2, 2, 2))
    layers.update(
        pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(4 * width * 2 ** (len(blocks) - 1), classes)
    )
    return _initialised(nn.Sequential(layers))


def small_swin(
    classes: int, width: int = 32, depths: Sequence[int] = (2, 2, 2, 2), drop_path: float = 0.1
) -> nn.Module:
    """Swin in another width, with patches of 2 px and windows of 4: for images of 64 px."""
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[2, 2],
        embed_dim=width,
        depths=list(depths),
        num_heads=[max(1, width * 2**i // 32) for i in range(len(depths))],
        window_size=[4, 4],
        stochastic_depth_prob=drop_path,
        num_classes=classes,
    )


def deeplabv3_resnet50(classes: int) -> nn.Module:
    """torchvision's DeepLabV3 on ResNet-50 with its auxiliary head, which takes the features of the third stage."""
    from torchvision.models.segmentation import deeplabv3_resnet50 as make

    return make(weights=None, weights_backbone=None, num_classes=classes, aux_loss=True)


def small_deeplabv3(
    classes: int, width: int = 16, blocks: Sequence[int] = (1, 1, 2, 1), head_width: int = 64
) -> nn.Module:
    """DeepLabV3 in another width: ResNet of bottlenecks with output stride 8, ASPP, auxiliary head at stage 3."""
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.deeplabv3 import ASPP, DeepLabV3
    from torchvision.models.segmentation.fcn import FCNHead

    layers = _bottleneck_encoder(width, blocks, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4))
    encoder = IntermediateLayerGetter(nn.Sequential(layers), {"layer4": "out", "layer3": "aux"})
    head = nn.Sequential(
        ASPP(32 * width, [3, 6, 9], head_width),
        nn.Conv2d(head_width, head_width, 3, padding=1, bias=False),
        nn.BatchNorm2d(head_width),
        nn.ReLU(),
        nn.Conv2d(head_width, classes, 1),
    )
    return _initialised(DeepLabV3(encoder, head, FCNHead(16 * width, classes)))


NETS: dict[str, Callable[..., nn.Module]] = {
    f.__name__: f
    for f in (small_resnet, small_cnn, speedrun, bottleneck_resnet, small_swin, deeplabv3_resnet50, small_deeplabv3)
}


def build(
    name: str, classes: int, options: dict[str, Any], weights: str | None, seed: int, size: int | None = None
) -> nn.Module:
    """A model whose initial weights are a function of the seed alone.

    Args:
        name: one of `NETS`, or see `by_name.build`.
        classes: of the last layer. A user's factory is called without arguments and sets them itself.
        options: passed to the builder.
        weights: a file of pretrained weights (`torch.save`d state dict) for the model or for its `backbone`.
        size: of the images, for models that must know it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every other device
        if name in NETS:
            _check_options(name, options)
            model = NETS[name](classes, **options)
        elif ":" in name:
            if options:
                raise ValueError(f"{name} is called without arguments; it cannot take model.options={options}")
            model = models.build(name)
        else:
            model = models.build(name, size, num_classes=classes, **options)
    if weights is not None:
        load_weights(model, Path(weights))
    return model


def known(name: str, options: Mapping[str, Any]) -> bool:
    """Whether building the model only runs code of halfway, torchvision and timm, whatever the recipe says.

    `package.module:factory` imports and calls whatever it names. Options of torchvision's and timm's builders can name
    files to load or download, so their models are only known without options; ours take nothing but numbers.
    """
    return name in NETS or (":" not in name and not options)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load pretrained weights from a file into the model or, if they are an encoder's, into its `backbone`.

    A classifier with another number of classes is left as it is; every other mismatch is an error.
    """
    if not path.is_file():
        raise FileNotFoundError(f"model.weights={str(path)!r} is not a file; give a state dict saved by torch.save")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path.name} is not a state dict saved by torch.save ({type(error).__name__})") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path.name} holds a {type(state).__name__}, not a state dict")
    backbone = getattr(model, "backbone", None)
    target = backbone if backbone is not None and not any(k.startswith("backbone.") for k in state) else model
    own = target.state_dict()
    fitting = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
    missing = [k for k in own if k not in fitting and not _is_head(k)]
    if missing:
        raise ValueError(
            f"{path.name} does not fit the model: {len(missing)} of its {len(own)} tensors are missing or of another "
            f"shape, for example {missing[0]!r}"
        )
    target.load_state_dict(fitting, strict=False)


def _is_head(key: str) -> bool:
    return key.split(".")[0] in ("fc", "head", "classifier", "aux_classifier")


def _check_options(name: str, options: dict[str, Any]) -> None:
    known = [p for p in inspect.signature(NETS[name]).parameters if p != "classes"]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}; {did_you_mean(option, known)}")


def _bottleneck_encoder(
    width: int, blocks: Sequence[int], strides: Sequence[int], dilations: Sequence[int] = (1, 1, 1, 1)
) -> OrderedDict[str, nn.Module]:
    from torchvision.models.resnet import Bottleneck

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    channels = width
    for i, (count, stride, dilation) in enumerate(zip(blocks, strides, dilations, strict=True)):
        layers[f"layer{i + 1}"] = _stage(Bottleneck, channels, width * 2**i, count, stride, dilation)
        channels = 4 * width * 2**i
    return layers


def _stage(block: Any, channels: int, planes: int, count: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """A stage of torchvision's blocks, the first of which changes channels and resolution."""
    out = planes * block.expansion
    project = None
    if stride != 1 or channels != out:
        project = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
    first = block(channels, planes, stride, project, dilation=dilation)
    return nn.Sequential(first, *(block(out, planes, dilation=dilation) for _ in range(count - 1)))


def _initialised(model: nn.Module) -> nn.Module:
    """He's initialisation for convolutions, as torchvision's ResNet has it."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
