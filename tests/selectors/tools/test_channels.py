"""Where the channels of a layer's features are."""

import pytest
import torch
from torch import nn

from halfway import Density, ForwardBlocker
from halfway.selectors.tools.channels import find_channel_dim


class NoWidth(nn.Module):
    pass


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Conv2d(3, 16, 3), (8, 16, 7, 7), 1),
        (nn.Conv2d(3, 16, 3), (8, 16, 16, 16), 1),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), (8, 16, 7, 5), 1),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()), (8, 16, 7, 5), 1),
        (nn.Conv1d(3, 16, 3), (8, 16, 7), 1),
        (nn.Conv3d(3, 16, 3), (8, 16, 4, 7, 7), 1),
        (nn.LayerNorm(12), (8, 7, 7, 12), -1),
        (nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)), (8, 7, 7, 12), -1),
        (nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.Dropout(0.1)), (8, 5, 24), -1),
        (nn.Embedding(30, 12), (8, 5, 12), -1),
        (nn.TransformerEncoderLayer(12, 2, 24), (8, 5, 12), -1),
        (nn.Linear(4, 12), (8, 12), 1),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten()), (8, 400), 1),
        (nn.Sequential(nn.Linear(3, 16), NoWidth()), (8, 16, 7, 7), 1),
        (NoWidth(), (8, 16, 7, 7), 1),
        (NoWidth(), (8, 7, 7, 16), -1),
        (NoWidth(), (8, 49, 16), -1),
        (None, (8, 16, 7, 5), 1),
    ],
)
def test_the_channel_axis_is_found(layer, shape, axis):
    found = find_channel_dim(layer, torch.Size(shape))
    assert found % len(shape) == axis % len(shape)


def in_model(model, layer_name, x):
    """The number of dimensions of the estimator after one step through the whole blocker."""
    selector = Density(num_centroids=2)
    blocker = ForwardBlocker(model, layer_name, 0.5, selector=selector, reuse="recompute")
    blocker(x)
    blocker.remove()
    return selector.estimator.dim


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_does_not_move_the_channels(memory_format):
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(6, 3, 8, 8)
    model(x)
    model = model.to(memory_format=memory_format)
    assert in_model(model, "0", x.to(memory_format=memory_format)) == 10


@pytest.mark.parametrize(
    ("name", "layer_name", "channels"),
    [
        ("resnet18", "layer1", 64),
        ("swin_t", "features.1", 96),
        ("swin_t", "features.2", 128),
        ("convnext_tiny", "features.1", 96),
        ("vit_b_16", "encoder.layers.encoder_layer_0", 128),
        ("mobilenet_v3_small", "features.3", 24),
    ],
)
def test_the_channels_of_torchvision_models_are_found(name, layer_name, channels):
    models = pytest.importorskip("torchvision").models
    settings = {"image_size": 32} if name.startswith("vit") else {}
    with torch.device("meta"):
        model = models.get_model(name, weights=None, **settings)
    layer = model.get_submodule(layer_name)
    shapes = []
    layer.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    model(torch.empty(3, 3, 64 if not settings else 32, 64 if not settings else 32, device="meta"))
    axis = find_channel_dim(layer, shapes[0])
    assert min(128, shapes[0][axis]) == channels
