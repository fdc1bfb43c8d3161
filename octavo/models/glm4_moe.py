"""GLM-4.5: Llama's attention with partial RoPE, DeepSeek-V3's experts. GLM team 2025."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.decoder import DecoderShape, PredictionLayer, plan_cache
from octavo.models.deepseek_v3 import DeepseekMlp
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.ops import RopeTable
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("num_mtp_layers", "num_nextn_predict_layers")
    shape = DecoderShape.read(config, num_kv_heads=8, norm_eps=1e-5)
    return build_llama(
        config,
        shape=shape,
        ropes=(_rope(config, shape),) * shape.num_layers,
        qkv_bias=config.flag("attention_bias", False),
        head_norms=config.flag("use_qk_norm", False),
        mlp=_mlp(config),
    )


def prediction_layer(config: HfConfig) -> PredictionLayer:
    """Returns the multi-token-prediction layer."""
    shape = DecoderShape.read(config, num_kv_heads=8, norm_eps=1e-5)
    cache = plan_cache(replace(shape, num_layers=1), [None])
    number = shape.num_layers
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers * (number + 1),
        ropes=(_rope(config, shape),) * (number + 1),
        scale=shape.head_dim**-0.5,
        qkv_bias=config.flag("attention_bias", False),
        head_norms=config.flag("use_qk_norm", False),
    )
    return PredictionLayer.behind_last(shape, cache.groups[0], attention, _mlp(config))


def _rope(config: HfConfig, shape: DecoderShape) -> RopeTable:
    return rope_parameters(config, partial=0.5).table(shape.head_dim)


def _mlp(config: HfConfig) -> DeepseekMlp:
    return DeepseekMlp.read(config, first_routed=1, scale=1.0, groups=(1, 1))
