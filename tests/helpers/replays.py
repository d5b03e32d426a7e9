"""Models to replay, from small to real, and the gradients they should get."""

import pytest
import torch
from torch import nn

import halfway


def scalar(output):
    """A loss of whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if hasattr(output, "values"):
        return sum(scalar(o) for o in output.values() if o is not None)
    return sum(scalar(o) for o in output)


def gradients(model, *args, **kwargs):
    model.zero_grad()
    scalar(model(*args, **kwargs)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(found, expected):
    assert found.keys() == expected.keys()
    scale = max(g.norm() for g in expected.values())
    return max(((found[n] - g).norm() / (g.norm() + 1e-3 * scale)).item() for n, g in expected.items())


def density(**kwargs):
    return halfway.Density(num_centroids=4, **kwargs)


def vision():
    return pytest.importorskip("torchvision").models


def timm_model(name, **kwargs):
    return pytest.importorskip("timm").create_model(name, **kwargs)


def unet():
    smp = pytest.importorskip("segmentation_models_pytorch")
    return smp.Unet("resnet18", encoder_weights=None, classes=3)


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


IMAGES = {
    "resnet18": (lambda: vision().resnet18(), "layer1", 32),
    "resnet50": (lambda: vision().resnet50(), "layer2", 32),
    "vgg11": (lambda: vision().vgg11().features, "7", 32),
    "squeezenet": (lambda: vision().squeezenet1_0(), "features.5", 64),
    "densenet121": (lambda: vision().densenet121(), "features.denseblock1", 32),
    "mobilenet_v3": (lambda: vision().mobilenet_v3_small(), "features.3", 64),
    "efficientnet_b0": (lambda: vision().efficientnet_b0(), "features.2", 64),
    "convnext": (lambda: timm_model("convnext_atto"), "stages.1", 64),
    "torchvision_swin": (lambda: vision().swin_t(), "features.1", 64),
    "timm_swin": (lambda: timm_model("swin_tiny_patch4_window7_224", img_size=56), "layers.0", 56),
    "vit": (lambda: timm_model("vit_tiny_patch16_224", img_size=64), "blocks.3", 64),
    "beit": (lambda: timm_model("beit_base_patch16_224", img_size=64, depth=3), "blocks.0", 64),
    "deeplab": (
        lambda: vision().segmentation.deeplabv3_resnet50(
            weights=None, weights_backbone=None, aux_loss=True, num_classes=3
        ),
        "backbone.layer3",
        64,
    ),
    "unet": (unet, "encoder.layer2", 32),
}


def freeze_batch_norm(model):
    """Without training-mode BatchNorm, and without dropout, training on the retained samples is the exact reference."""
    for module in model.modules():
        draws = isinstance(module, nn.Dropout) or type(module).__name__ in ("StochasticDepth", "DropPath")
        if draws or isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def small_net():
    shallow = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)]
    return nn.Sequential(*shallow, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 4)).train()


def plain_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).train()


def blocked(model, **kwargs):
    return halfway.ForwardBlocker(model, "2", 0.5, selector=density(), **kwargs)


def check_recomputed(model, blocker, x, found, reason):
    assert blocker.stats.steps_replayed == 0
    assert reason in " ".join(blocker.stats.recompute_reasons), blocker.stats.recompute_reasons
    blocker.remove()
    assert relative_difference(found, gradients(model, x)) < 1e-6
