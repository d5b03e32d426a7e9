"""The models of the zoo: how each is built small and with random weights, where it is cut and what it is fed.

Nothing is downloaded. `CASES` has all of them; those with `sample=True` run in the default suite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.model_zoo_transformers import HUGGING_FACE

IMAGES = (3, 64, 64)


@dataclass(frozen=True)
class Case:
    """One model.

    at: the cut.
    inputs: a fresh batch of n samples, as keywords of the model, or a tensor.
    may_recompute: its shallow part cannot be replayed by every version of halfway; all others must be.
    sample: belongs to the default suite.
    """

    family: str
    name: str
    at: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor | Mapping[str, Tensor]]
    may_recompute: bool = False
    sample: bool = False


def _images(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *(shape or IMAGES))


# ------------------------------------------------------------------------------------------------------------- timm

# Most take the size as an argument of their own (`img_size`), the purely convolutional ones do not care.
_SIZED = {"img_size": IMAGES[1]}
_TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "botnet26t_256": ("stages.1", _SIZED),
    "caformer_s18": ("stages.0", {}),
    "cait_xxs24_224": ("blocks.1", _SIZED),
    "coat_lite_tiny": ("serial_blocks1.1", _SIZED),
    "coatnet_pico_rw_224": ("stages.0", _SIZED),
    "convit_tiny": ("blocks.1", _SIZED),
    "convnext_atto": ("stages.1", {}),
    "convnextv2_atto": ("stages.1", {}),
    "csatv2": ("stages.0", _SIZED),
    "cspresnet50": ("stages.0", {}),
    "davit_tiny": ("stages.0", {}),
    "deit3_small_patch16_224": ("blocks.1", {**_SIZED, "depth": 4}),
    "densenet121": ("features.denseblock1", {}),
    "dla46_c": ("level3", {}),
    "eca_nfnet_l0": ("stages.0", {}),
    "edgenext_xx_small": ("stages.1", {}),
    "efficientformerv2_s0": ("stages.1", _SIZED),
    "efficientvit_b0": ("stages.1", {}),
    "efficientvit_m0": ("stages.0", _SIZED),
    "ese_vovnet19b_slim": ("stages.0", {}),
    "eva02_tiny_patch14_224": ("blocks.1", {"img_size": 56}),
    "fastvit_t8": ("stages.0", {}),
    "focalnet_tiny_srf": ("layers.0", {}),
    "gcvit_xxtiny": ("stages.0", _SIZED),
    "gernet_s": ("stages.1", {}),
    "ghostnetv2_100": ("blocks.2", {"drop_rate": 0.0}),
    "gmlp_ti16_224": ("blocks.2", _SIZED),
    "hiera_tiny_224": ("blocks.1", _SIZED),
    "hrnet_w18_small": ("layer1", {}),
    "inception_next_atto": ("stages.1", {}),
    "lambda_resnet26t": ("stages.1", _SIZED),
    "levit_128s": ("stages.0", _SIZED),
    "mambaout_femto": ("stages.0", {}),
    "maxvit_rmlp_pico_rw_256": ("stages.0", _SIZED),
    "mixer_s32_224": ("blocks.1", _SIZED),
    "mobilenetv3_small_050": ("blocks.2", {}),
    "mobilenetv4_conv_small": ("blocks.1", {}),
    "mobileone_s0": ("stages.0", {}),
    "mobilevit_xxs": ("stages.2", {}),
    "mvitv2_tiny": ("stages.0.blocks.0.mlp", _SIZED),
    "nest_tiny": ("levels.0", _SIZED),
    "nf_regnet_b1": ("stages.0", {}),
    "pit_ti_224": ("transformers.0.blocks.1", _SIZED),
    "poolformerv2_s12": ("stages.0", {}),
    "pvt_v2_b0": ("stages.1", {}),
    "rdnet_tiny": ("dense_stages.0", {}),
    "regnety_002": ("s2", {}),
    "repvgg_a0": ("stages.0", {}),
    "repvit_m0_9": ("stages.0", {}),
    "res2net50_26w_4s": ("layer1", {}),
    "resmlp_12_224": ("blocks.1", _SIZED),
    "resnest14d": ("layer1", {}),
    "sequencer2d_s": ("stages.0", _SIZED),
    "shvit_s1": ("stages.0", {}),
    "skresnet18": ("layer1", {}),
    "starnet_s1": ("stages.1", {}),
    "swiftformer_xs": ("stages.1", {}),
    "swinv2_cr_tiny_ns_224": ("stages.0", _SIZED),
    "tf_efficientnetv2_b0": ("blocks.2", {}),
    "tiny_vit_5m_224": ("stages.1", {}),
    "twins_svt_small": ("blocks.0.1", _SIZED),
    "visformer_tiny": ("stage1", _SIZED),
    "vit_little_patch16_reg1_gap_256": ("blocks.1", _SIZED),
    "vit_small_patch16_dinov3": ("blocks.1", _SIZED),
    "volo_d1_224": ("network.0", _SIZED),
    "xception41": ("blocks.1", {}),
    "xcit_nano_12_p16_224": ("blocks.1", _SIZED),
}


def _timm(name: str, at: str, options: dict[str, Any]) -> Case:
    def build() -> nn.Module:
        return pytest.importorskip("timm").create_model(name, pretrained=False, num_classes=10, **options)

    size = options.get("img_size", IMAGES[1])
    return Case("timm", name, at, build, _images(3, size, size), name in _MAY_RECOMPUTE, name in _SAMPLE)


# ------------------------------------------------------------------------------------------------------ torchvision

_VIDEO = _images(3, 4, 32, 32)


def _pairs(n: int) -> dict[str, Tensor]:
    return {"image1": torch.randn(n, 3, 128, 128), "image2": torch.randn(n, 3, 128, 128)}


_NO_BACKBONE: dict[str, Any] = {"weights_backbone": None, "num_classes": 3}
_TORCHVISION: dict[str, tuple[str, dict[str, Any], Callable[[int], Any]]] = {
    "deeplabv3_mobilenet_v3_large": ("backbone.4", {**_NO_BACKBONE, "aux_loss": True}, _images()),
    "fcn_resnet50": ("backbone.layer1", {**_NO_BACKBONE, "aux_loss": True}, _images()),
    "googlenet": ("inception3a", {"aux_logits": True, "init_weights": False}, _images()),
    "inception_v3": ("Mixed_5b", {"aux_logits": False, "init_weights": False}, _images(3, 96, 96)),
    "lraspp_mobilenet_v3_large": ("backbone.4", _NO_BACKBONE, _images()),
    "mc3_18": ("layer1", {}, _VIDEO),
    "mnasnet0_5": ("layers.8", {}, _images()),
    "r2plus1d_18": ("layer1", {}, _VIDEO),
    "r3d_18": ("layer1", {}, _VIDEO),
    "raft_small": ("context_encoder", {}, _pairs),
    "regnet_x_400mf": ("trunk_output.block2", {}, _images()),
    "shufflenet_v2_x0_5": ("stage2", {}, _images()),
    "swin3d_t": ("features.0", {}, _VIDEO),
    "swin_v2_t": ("features.1", {}, _images()),
}


def _smooth(model: nn.Module) -> nn.Module:
    """Without kinks. Where InstanceNorm feeds a ReLU, rounding alone turns some of them, and gradients by 1e-3."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.SiLU())
    return model


def _torchvision(name: str, at: str, options: dict[str, Any], inputs: Callable[[int], Any]) -> Case:
    def build() -> nn.Module:
        model = pytest.importorskip("torchvision").models.get_model(name, weights=None, **options)
        return _smooth(model) if name == "raft_small" else model

    return Case("torchvision", name, at, build, inputs, name in _MAY_RECOMPUTE, name in _SAMPLE)


# -------------------------------------------------------------------------------------- segmentation_models_pytorch

_NARROW = {"decoder_intermediate_channels": (16, 16, 32, 32), "decoder_fusion_channels": 16}
_SMP: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DPT": ("tu-vit_tiny_patch16_224", "encoder.model.blocks.1", {"dynamic_img_size": True, **_NARROW}),
    "DeepLabV3": ("resnet18", "encoder.layer1", {}),
    "DeepLabV3Plus": ("mobilenet_v2", "encoder.features.3", {}),
    "FPN": ("resnet18", "encoder.layer1", {}),
    "Linknet": ("tu-tf_efficientnetv2_b0", "encoder.model.blocks.1", {}),
    "MAnet": ("resnet18", "encoder.layer2", {}),
    "PAN": ("resnet18", "encoder.layer2", {}),
    "PSPNet": ("resnet18", "encoder.layer1", {}),
    "Segformer": ("mit_b0", "encoder.block1.1", {}),
    "UPerNet": ("tu-convnext_atto", "encoder.model.stages_0", {}),
    "Unet": ("resnet18", "encoder.layer2", {"aux_params": {"classes": 4, "dropout": 0.0}}),
    "UnetPlusPlus": ("tu-regnety_002", "encoder.model.s2", {}),
}


def _smp(architecture: str, encoder: str, at: str, options: dict[str, Any]) -> Case:
    def build() -> nn.Module:
        smp = pytest.importorskip("segmentation_models_pytorch")
        return getattr(smp, architecture)(encoder, encoder_weights=None, classes=3, **options)

    # PAN pools its last map three times.
    inputs = _images(3, 128, 128) if architecture == "PAN" else _images()
    return Case(
        "segmentation_models_pytorch", f"{architecture}, {encoder}", at, build, inputs, False, architecture in _SAMPLE
    )


# ----------------------------------------------------------------------------------------------------- Hugging Face


def _hugging_face(name: str, at: str, config: Callable[[Any], Any], inputs: Callable[[int], dict[str, Tensor]]) -> Case:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, name.partition(",")[0])(config(transformers))

    return Case("Hugging Face", name, at, build, inputs, name in _MAY_RECOMPUTE, name in _SAMPLE)


_MAY_RECOMPUTE = {"gcvit_xxtiny", "csatv2", "sequencer2d_s", "MixtralModel"}
_SAMPLE = {
    "convnext_atto", "gcvit_xxtiny", "mobilenetv3_small_050", "xcit_nano_12_p16_224",
    "googlenet", "shufflenet_v2_x0_5",
    "Unet",
    "DPTForDepthEstimation", "LlamaForCausalLM, output_hidden_states", "SegformerForSemanticSegmentation",
}  # fmt: skip

CASES = (
    *(_timm(name, *case) for name, case in _TIMM.items()),
    *(_torchvision(name, *case) for name, case in _TORCHVISION.items()),
    *(_smp(name, *case) for name, case in _SMP.items()),
    *(_hugging_face(name, *case) for name, case in HUGGING_FACE.items()),
)
