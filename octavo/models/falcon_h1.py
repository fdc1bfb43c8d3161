"""Falcon-H1: attention and Mamba-2 in parallel in each layer, with scaling factors on matmuls. TII
2025.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, Frame, NormNames, Sublayer, build_decoder
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import LayerPlan, mamba2_mixer, mamba2_sizes, self_attention
from octavo.models.rope import rope_parameters
from octavo.models.state_space import MixerFactors
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=8, norm_eps=1e-5)
    everywhere = [True] * shape.num_layers
    plan = LayerPlan(everywhere, everywhere)
    sizes = mamba2_sizes(config, shape.hidden_size, _inner(config))
    rope = rope_parameters(config).table(shape.head_dim)
    attention = replace(
        self_attention(config, shape, plan, rope, shape.head_dim**-0.5),
        k_factor=config.number("key_multiplier", 1.0),
    )
    mixer = replace(
        mamba2_mixer(config, shape, plan, sizes),
        norm_eps=shape.norm_eps if config.flag("mamba_rms_norm", False) else None,
        norms_first=config.flag("mamba_norm_before_gate", True),
        factors=_mixer_factors(config),
        out_bias=config.flag("projectors_bias", False),
    )
    read, attended, recurred = (
        config.number(name, 1.0)
        for name in ("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier")
    )
    config.without_effect("num_logits_to_keep", "mamba_use_mlp", "layer_types")
    config.without_effect("mamba_expand", "mlp_expansion_factor", "layers_block_type")

    def mix(b: Builder, x: Value, layer: int) -> Value:
        state = b.scale(mixer(b, x, layer), recurred)
        return b.add(state, b.scale(attention(b, b.scale(x, read), layer), attended))

    frame = Frame(
        norms=NormNames("input_layernorm", "pre_ff_layernorm"),
        final_norm="model.final_layernorm",
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )
    groups = plan.groups(shape, sizes, sizes.conv_width)
    return build_decoder(shape, groups, mix, _mlp(config), frame)


def _inner(config: HfConfig) -> int | None:
    return None if config.values.get("mamba_d_ssm") is None else config.size("mamba_d_ssm")


def _mixer_factors(config: HfConfig) -> MixerFactors:
    gate, x, left, right, dt = _numbers(config, "ssm_multipliers", 5)
    rows = config.number("ssm_in_multiplier", 1.0)
    return MixerFactors(rows, gate, (x, left, right), dt)


def _mlp(config: HfConfig) -> Sublayer:
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    bias = config.flag("mlp_bias", False)
    opened, out = _numbers(config, "mlp_multipliers", 2)

    def mlp(b: Builder, x: Value, layer: int) -> Value:
        name = f"model.layers.{layer}.feed_forward"
        gate = b.scale(b.linear(x, f"{name}.gate_proj", width, bias=bias), opened)
        up = b.linear(x, f"{name}.up_proj", width, bias=bias)
        down = b.linear(b.act_mul(gate, up, activation), f"{name}.down_proj", x.width, bias=bias)
        return b.scale(down, out)

    return mlp


def _numbers(config: HfConfig, name: str, count: int) -> list[float]:
    """Reads a list of `count` factors; all 1 if missing."""
    given = config.values.get(name)
    if given is None:
        return [1.0] * count
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(isinstance(number, int | float) for number in given)
    ):
        raise UnsupportedModel(
            f"config.json: {name} is {given!r}, expected a list of {count} numbers"
        )
    return [float(number) for number in given]
