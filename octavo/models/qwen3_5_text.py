"""Qwen3.5's language model: Gated DeltaNet with gated attention in every fourth layer. Qwen team
2026.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Frame, Sublayer, build_decoder, rms_norm
from octavo.models.gated_delta import (
    PARTIAL,
    gated_attention,
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


def build(config: HfConfig, *, has_images: bool = False) -> dict[str, Program]:
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    return build_qwen3_5(
        config,
        num_kv_heads=4,
        mlp=lambda b, x, i: gated_mlp(b, x, f"model.layers.{i}.mlp", width, activation),
        has_images=has_images,
    )


def build_qwen3_5(
    config: HfConfig, *, num_kv_heads: int, mlp: Sublayer, has_images: bool = False
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
