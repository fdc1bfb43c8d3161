"""Granite 3 MoE: Granite with routed experts, gate and up in one tensor. IBM 2024.

In GGUF (`separate_experts`) gate and up are separate tensors.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Sublayer
from octavo.models.granite import make_frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.mlps import gated_experts
from octavo.program.builder import Builder
from octavo.program.program import Program, Value, Weight


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config)
    config.refuse_unless("position_embedding_type", "rope")
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=shape,
        scale=config.positive("attention_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp=routed_experts(config, shape),
        frame=make_frame(config),
    )


def routed_experts(config: HfConfig, shape: DecoderShape) -> Sublayer:
    num_experts, top_k = config.count("num_local_experts"), config.count("num_experts_per_tok")
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    stacked = (num_experts, width, shape.hidden_size)

    separate = config.flag("separate_experts", False)

    def mlp(b: Builder, x: Value, i: int) -> Value:
        name = f"model.layers.{i}.block_sparse_moe"
        logits = b.linear(x, f"{name}.router.layer", num_experts)
        routed = rows, ids, weights = b.route(x, logits, top_k, score="softmax_top_k")
        if separate:
            experts = f"{name}.experts"
            return gated_experts(
                b, routed, experts, num_experts=num_experts, width=width, activation=activation
            )
        gate, up = (
            Weight(f"{name}.input_linear.weight", stacked, source_rows=2 * width, row_start=start)
            for start in (0, width)
        )
        down = Weight(f"{name}.output_linear.weight", (num_experts, shape.hidden_size, width))
        h = b.act_mul(
            b.grouped_linear(rows, ids, gate), b.grouped_linear(rows, ids, up), activation
        )
        return b.combine(b.grouped_linear(h, ids, down), weights)

    return mlp
