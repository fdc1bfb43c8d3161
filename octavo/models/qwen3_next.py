"""Qwen3-Next: Gated DeltaNet with gated attention in every fourth layer, routed experts and a gated
shared expert. Qwen team 2025.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    PredictionLayer,
    build_decoder,
    rms_norm,
)
from octavo.models.gated_delta import (
    MTP_LAYERS,
    gated_attention,
    gated_prediction_layer,
    make_cache_groups,
    read_mixer,
    read_plan,
)
from octavo.models.hf_config import HfConfig
from octavo.models.qwen2_moe import shared_experts
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=2, head_dim=256)
    plan = read_plan(config, shape.num_layers)
    mixer = read_mixer(config, shape, plan, stacked=True)
    attention = gated_attention(config, shape, plan.caches)
    mlp = shared_experts(config, normalize=True)
    frame = Frame(norm=rms_norm(shape.norm_eps, offset=1.0))
    groups = make_cache_groups(shape, plan, mixer)
    return build_decoder(shape, groups, plan.mix(attention, mixer), mlp, frame)


def prediction_layer(config: HfConfig) -> PredictionLayer:
    """Returns the multi-token-prediction layer."""
    shape = DecoderShape.read(config, num_kv_heads=2, head_dim=256)
    mlp = shared_experts(config, normalize=True, layers=MTP_LAYERS)
    return gated_prediction_layer(config, shape, mlp)
