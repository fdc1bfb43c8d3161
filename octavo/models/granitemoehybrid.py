"""Granite 4: Mamba-2 mixers with attention in some layers, routed and shared experts, and Granite's
factors. IBM 2025.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Sublayer, build_decoder
from octavo.models.granite import make_frame
from octavo.models.granitemoe import routed_experts
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import (
    LayerPlan,
    layers_by_type,
    mamba2_mixer,
    mamba2_sizes,
    self_attention,
)
from octavo.models.mlps import gated_mlp, stacked_gated_mlp
from octavo.models.rope import rope_parameters
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config)
    count = shape.num_layers
    plan = layers_by_type(config, count) or LayerPlan([False] * count, [True] * count)
    sizes = mamba2_sizes(config, shape.hidden_size)
    rope = None
    if config.text("position_embedding_type", "nope") == "rope":
        rope = rope_parameters(config).table(shape.head_dim)
    config.refuse_unless("position_embedding_type", "rope", "nope")
    config.without_effect("rope_parameters", "rope_theta", "rope_scaling", "layers_block_type")
    config.without_effect("shared_intermediate_size_multiple_of", "normalization_function")
    scale = config.positive("attention_multiplier", 1.0)
    attention = self_attention(config, shape, plan, rope, scale)
    mixer = mamba2_mixer(config, shape, plan, sizes)
    mlp = _mlp(config, shape)
    groups = plan.groups(shape, sizes, sizes.conv_width)
    return build_decoder(shape, groups, plan.mix(attention, mixer), mlp, make_frame(config))


def _mlp(config: HfConfig, shape: DecoderShape) -> Sublayer:
    width = config.size("shared_intermediate_size", 1024)
    activation = config.activation("hidden_act", "silu")
    has_experts = config.integer("num_local_experts", 8, low=0) > 0
    experts = routed_experts(config, shape) if has_experts else None
    if experts is None:
        config.without_effect("num_experts_per_tok", "intermediate_size")

    separate = config.flag("separate_experts", False)

    def shared_mlp(b: Builder, x: Value, name: str) -> Value:
        if separate:
            return gated_mlp(b, x, name, width, activation)
        names = ("input_linear", "output_linear")
        return stacked_gated_mlp(b, x, name, width, activation, names=names)

    def mlp(b: Builder, x: Value, layer: int) -> Value:
        shared = shared_mlp(b, x, f"model.layers.{layer}.shared_mlp")
        return shared if experts is None else b.add(experts(b, x, layer), shared)

    return mlp
