"""Qwen3.5's language model: Gated DeltaNet with gated attention in every fourth layer. Qwen team
2026.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    PredictionLayer,
    Sublayer,
    build_decoder,
    rms_norm,
)
from octavo.models.gated_delta import (
    MTP_LAYERS,
    PARTIAL,
    gated_attention,
    gated_prediction_layer,
    make_cache_groups,
    read_mixer,
    read_plan,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.mrope import mrope_table
from octavo.models.rope import DEFAULT_THETA
from octavo.program.ops import RopeTable
from octavo.program.program import Program

SECTIONS = (11, 11, 10)
"""Default of mrope_section."""

NUM_KV_HEADS = 4
"""Default of num_key_value_heads."""

MakeMlp = Callable[[HfConfig, str], Sublayer]
"""Reads a family's MLP from a config; it names its modules after the given module of layers."""


def build(config: HfConfig, *, has_images: bool = False) -> dict[str, Program]:
    return build_qwen3_5(config, NUM_KV_HEADS, _mlp, has_images=has_images)


def prediction_layer(config: HfConfig, *, has_images: bool = False) -> PredictionLayer:
    """Returns the multi-token-prediction layer."""
    return build_qwen3_5_prediction_layer(config, NUM_KV_HEADS, _mlp, has_images=has_images)


def build_qwen3_5_prediction_layer(
    config: HfConfig, num_kv_heads: int, make_mlp: MakeMlp, *, has_images: bool
) -> PredictionLayer:
    """Returns the prediction layer with the given MLP; `num_kv_heads` is the family's default."""
    config.refuse_unless("mtp_num_hidden_layers", 1)
    shape = DecoderShape.read(config, num_kv_heads=num_kv_heads, head_dim=256)
    rope = _image_rope(config, shape) if has_images else None
    return gated_prediction_layer(config, shape, make_mlp(config, MTP_LAYERS), rope)


def _mlp(config: HfConfig, layers: str) -> Sublayer:
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    return lambda b, x, i: gated_mlp(b, x, f"{layers}.{i}.mlp", width, activation)


def build_qwen3_5(
    config: HfConfig, num_kv_heads: int, make_mlp: MakeMlp, *, has_images: bool
) -> dict[str, Program]:
    """Builds the decoder with the given MLP; `num_kv_heads` is the family's default."""
    config.refuse_unless("attn_output_gate", True)
    config.without_effect("mamba_ssm_dtype", "mlp_only_layers")
    config.without_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    shape = DecoderShape.read(config, num_kv_heads=num_kv_heads, head_dim=256)
    plan = read_plan(config, shape.num_layers)
    mixer = read_mixer(config, shape, plan, stacked=False)
    rope = _image_rope(config, shape) if has_images else None
    attention = gated_attention(config, shape, plan.caches, rope)
    frame = Frame(norm=rms_norm(shape.norm_eps, offset=1.0), takes_rows=has_images)
    groups = make_cache_groups(shape, plan, mixer)
    mlp = make_mlp(config, "model.layers")
    return build_decoder(shape, groups, plan.mix(attention, mixer), mlp, frame)


def _image_rope(config: HfConfig, shape: DecoderShape) -> RopeTable:
    return mrope_table(
        config,
        shape.head_dim,
        sections=SECTIONS,
        theta=DEFAULT_THETA,
        interleaved=True,
        partial=PARTIAL,
    )
