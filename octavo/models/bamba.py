"""Bamba: Mamba-2 mixers with attention in some layers, and a gated MLP in each. IBM and others
2024.
"""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
    build_decoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import LayerPlan, mamba2_mixer, mamba2_sizes, self_attention
from octavo.models.mlps import gated_mlp
from octavo.models.rope import rope_parameters
from octavo.program.builder import Builder
from octavo.program.program import Program, Value

FRAME = Frame(
    norms=NormNames("input_layernorm", "pre_ff_layernorm"), final_norm="model.final_layernorm"
)

TURNED_SHARE = 0.5
"""Fraction of a head's columns that RoPE rotates, in every published model."""


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=8, norm_eps=1e-5)
    config.refuse_unless("attn_rotary_emb", int(shape.head_dim * TURNED_SHARE))
    config.without_effect("num_logits_to_keep", "z_loss_coefficient")
    plan = _plan(config, shape.num_layers)
    sizes = mamba2_sizes(config, shape.hidden_size)
    rope = rope_parameters(config, partial=TURNED_SHARE).table(shape.head_dim)
    attention = self_attention(config, shape, plan, rope, shape.head_dim**-0.5)
    mixer = mamba2_mixer(config, shape, plan, sizes)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    bias = config.flag("mlp_bias", False)

    def mlp(b: Builder, x: Value, layer: int) -> Value:
        name = f"model.layers.{layer}.feed_forward"
        return gated_mlp(b, x, name, width, activation, bias=bias)

    groups = plan.groups(shape, sizes, sizes.conv_width)
    return build_decoder(shape, groups, plan.mix(attention, mixer), mlp, FRAME)


def _plan(config: HfConfig, num_layers: int) -> LayerPlan:
    indices = config.integers("attn_layer_indices")
    if any(not 0 <= index < num_layers for index in indices):
        raise UnsupportedModel(
            f"config.json: attn_layer_indices is {list(indices)}, expected 0 to"
            f" {num_layers - 1}, the layer indices"
        )
    config.without_effect("layer_types", "layers_block_type")
    attends = [layer in indices for layer in range(num_layers)]
    return LayerPlan(attends, [not each for each in attends])
