"""Jamba: Mamba mixers, attention in every eighth layer and routed experts in every second. AI21
2024.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
    Sublayer,
    build_decoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import LayerPlan, self_attention
from octavo.models.mlps import gated_experts, gated_mlp
from octavo.models.state_space import MAX_TAPS, Mamba1, StateSpace
from octavo.program.builder import Builder
from octavo.program.program import Program, Value

FRAME = Frame(
    norms=NormNames("input_layernorm", "pre_ff_layernorm"), final_norm="model.final_layernorm"
)


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=8)
    attends = _get_chosen_layers(config, shape.num_layers, "attn_layer", period=8, offset=4)
    plan = LayerPlan(attends, [not each for each in attends])
    inner = int(config.positive("mamba_expand", 2) * shape.hidden_size)
    sizes = StateSpace(
        inner=inner,
        num_heads=inner,
        state_size=config.size("mamba_d_state", 16),
        taps=config.integer("mamba_d_conv", 4, low=1, high=MAX_TAPS),
        activation=config.activation("hidden_act", "silu"),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
    )
    rank = -(-shape.hidden_size // 16)
    if config.values.get("mamba_dt_rank") not in (None, "auto"):
        rank = config.size("mamba_dt_rank")
    config.without_effect("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    config.without_effect("num_logits_to_keep", "calc_logits_for_entire_prompt")
    config.refuse_unless("mamba_inner_layernorms", True)
    config.refuse_unless("sliding_window", None)
    module = "model.layers.{}.mamba"
    mixer = Mamba1(sizes, rank, module, plan.index, norm_eps=shape.norm_eps)
    attention = self_attention(config, shape, plan, None, shape.head_dim**-0.5)
    groups = plan.groups(shape, sizes, inner)
    mlp = _mlp(config, shape.num_layers)
    return build_decoder(shape, groups, plan.mix(attention, mixer), mlp, FRAME)


def _mlp(config: HfConfig, num_layers: int) -> Sublayer:
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    num_experts, top_k = config.count("num_experts", 16), config.count("num_experts_per_tok", 2)
    routes = _get_chosen_layers(config, num_layers, "expert_layer", period=2, offset=1)

    def mlp(b: Builder, x: Value, layer: int) -> Value:
        name = f"model.layers.{layer}.feed_forward"
        if num_experts == 1 or not routes[layer]:
            return gated_mlp(b, x, name, width, activation)
        routed = b.route(x, b.linear(x, f"{name}.router", num_experts), top_k)
        return gated_experts(
            b,
            routed,
            f"{name}.experts",
            num_experts=num_experts,
            width=width,
            activation=activation,
        )

    return mlp


def _get_chosen_layers(
    config: HfConfig, num_layers: int, name: str, *, period: int, offset: int
) -> list[bool]:
    """Returns for each layer whether it is one of every `period`, starting at `offset`."""
    step = config.integer(f"{name}_period", period, low=1)
    first = config.integer(f"{name}_offset", offset, low=0, high=step - 1)
    return [layer % step == first for layer in range(num_layers)]
