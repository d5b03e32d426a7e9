"""Hugging Face models of the zoo: the cut, a tiny configuration without dropout, and a batch of n samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WORDS = 50
_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_IMAGE = {**_SMALL, "image_size": 32, "patch_size": 8}
_CAUSAL = {**_SMALL, "vocab_size": _WORDS, "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_SMALL, **_NO_DROPOUT, "vocab_size": _WORDS}
_GPT2 = {
    "vocab_size": _WORDS, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_WAV2VEC2 = {
    **_SMALL, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "apply_spec_augment": False, "use_weighted_layer_sum": True,
}  # fmt: skip


def _pixels(n: int, size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, size, size)}


def _words(n: int) -> dict[str, Tensor]:
    """Token ids, and a mask that hides the end of some."""
    mask = torch.ones(n, 8, dtype=torch.int64)
    mask[::2, 6:] = 0
    return {"input_ids": _tokens(n, 8), "attention_mask": mask}


def _tokens(n: int, length: int = 5) -> Tensor:
    return torch.randint(1, _WORDS, (n, length))


_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}

# What is after the comma says what is special about a case.
HUGGING_FACE: dict[str, tuple[str, Callable[[Any], Any], Callable[[int], dict[str, Tensor]]]] = {
    "BeitForSemanticSegmentation": (
        "beit.layers.0",
        lambda t: t.BeitConfig(
            **{**_IMAGE, "num_hidden_layers": 4},
            out_indices=[1, 2, 3, 4],
            drop_path_rate=0.0,
            pool_scales=(1, 2),
            auxiliary_channels=8,
            use_relative_position_bias=True,
            num_labels=3,
        ),
        _pixels,
    ),
    "BertModel, output_hidden_states": (
        "encoder.layer.0",
        lambda t: t.BertConfig(**_BERT, output_hidden_states=True),
        _words,
    ),
    "BertModel, output_attentions": (
        "encoder.layer.0",
        lambda t: t.BertConfig(**_BERT, output_attentions=True, attn_implementation="eager"),
        _words,
    ),
    "CLIPModel": (
        "vision_model.encoder.layers.0",
        lambda t: t.CLIPConfig(
            text_config={**_SMALL, "vocab_size": _WORDS, "bos_token_id": 1, "eos_token_id": 2},
            vision_config=_IMAGE,
            projection_dim=16,
        ),
        lambda n: {**_words(n), **_pixels(n)},
    ),
    "DPTForDepthEstimation": (
        "dpt.encoder.layer.0",
        lambda t: t.DPTConfig(
            **{**_IMAGE, "num_hidden_layers": 4},
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
            is_hybrid=False,
            hidden_dropout_prob=0.0,
        ),
        _pixels,
    ),
    "DepthAnythingForDepthEstimation": (
        "backbone.encoder.layer.0",
        lambda t: t.DepthAnythingConfig(
            backbone_config=t.Dinov2Config(**_IMAGE, out_indices=[0, 1, 2, 3], reshape_hidden_states=False),
            reassemble_hidden_size=32,
            patch_size=8,
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
            head_hidden_size=8,
            depth_estimation_type="metric",  # a sigmoid at the end, where a ReLU might be dead
        ),
        _pixels,
    ),
    "DetrForObjectDetection": (
        "model.encoder.layers.0",
        lambda t: t.DetrConfig(
            backbone_config=t.ResNetConfig(**_RESNET, out_features=["stage4"]),
            num_queries=5,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            dropout=0.0,
            num_labels=3,
        ),
        lambda n: _pixels(n, 64),
    ),
    "Dinov2Model": ("encoder.layer.0", lambda t: t.Dinov2Config(**_IMAGE), _pixels),
    "DistilBertModel": (
        "transformer.layer.0",
        lambda t: t.DistilBertConfig(
            vocab_size=_WORDS, dim=32, n_layers=3, n_heads=4, hidden_dim=64, dropout=0.0, attention_dropout=0.0
        ),
        _words,
    ),
    "GPT2LMHeadModel, output_hidden_states": (
        "transformer.h.0",
        lambda t: t.GPT2Config(**_GPT2, output_hidden_states=True),
        _words,
    ),
    "LlamaForCausalLM, output_hidden_states": (
        "model.layers.0",
        lambda t: t.LlamaConfig(**_CAUSAL, num_key_value_heads=2, output_hidden_states=True),
        _words,
    ),
    "MambaModel": (
        "layers.0",
        lambda t: t.MambaConfig(vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2, state_size=4, use_cache=False),
        lambda n: {"input_ids": _tokens(n, 8)},
    ),
    "MixtralModel": (
        "layers.0",
        lambda t: t.MixtralConfig(**_CAUSAL, num_key_value_heads=2, num_local_experts=4),
        _words,
    ),
    "SegformerForSemanticSegmentation": (
        "segformer.stages.0.blocks.0",
        lambda t: t.SegformerConfig(
            depths=[1] * 4,
            hidden_sizes=[8, 16, 16, 32],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=16,
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
            num_labels=3,
        ),
        lambda n: _pixels(n, 64),
    ),
    "T5ForConditionalGeneration": (
        "encoder.block.0.layer.1",
        lambda t: t.T5Config(
            vocab_size=_WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
        ),
        lambda n: {**_words(n), "decoder_input_ids": _tokens(n)},
    ),
    "ViTForImageClassification": ("vit.layers.0", lambda t: t.ViTConfig(**_IMAGE, **_NO_DROPOUT), _pixels),
    "Wav2Vec2ForSequenceClassification, use_weighted_layer_sum": (
        "wav2vec2.encoder.layers.0",
        lambda t: t.Wav2Vec2Config(**_WAV2VEC2),
        lambda n: {"input_values": torch.randn(n, 400)},
    ),
    "WhisperForConditionalGeneration": (
        "model.encoder.layers.0",
        lambda t: t.WhisperConfig(
            vocab_size=_WORDS,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=16,
            max_target_positions=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
        ),
        lambda n: {"input_features": torch.randn(n, 8, 32), "decoder_input_ids": _tokens(n)},
    ),
}
