"""Phi-3.5-MoE: LayerNorms with biases, two experts per token with SparseMixer weights. Abdin et al.
2024; Liu et al. 2023.

With longrope, each list of factors has its own scale on cos and sin. transformers 5 uses the short
list for any length, unlike transformers 4 and the model's own code; here it applies up to the
original context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.models.decoder import DecoderShape, Frame, layer_norm
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.mlps import gated_experts
from octavo.models.rope import rope_parameters
from octavo.program.builder import Builder
from octavo.program.ops import Activation, LongAngles, RopeTable
from octavo.program.program import Program, Value

DEFAULT_THETA = 1e6
EXPERTS_A_TOKEN = 2
"""SparseMixer always chooses this many experts."""


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("num_experts_per_tok", EXPERTS_A_TOKEN)
    shape = DecoderShape.read(config, num_kv_heads=8, norm_eps=1e-5)
    window = config.optional_integer("sliding_window")
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=shape,
        windows=config.layer_windows(shape.num_layers, window, lambda i: True),
        ropes=(_angles(config, shape.head_dim),) * shape.num_layers,
        qkv_bias=bias,
        out_bias=bias,
        mlp=PhimoeMlp.read(config),
        frame=Frame(norm=layer_norm(shape.norm_eps), head_bias=config.flag("lm_head_bias", False)),
    )


def _angles(config: HfConfig, head_dim: int) -> RopeTable:
    """Returns the RoPE table; short_mscale and long_mscale replace the attention factor."""
    rope = rope_parameters(config, default_theta=DEFAULT_THETA)
    table = rope.table(head_dim)
    if rope.kind == "default":
        return table
    short, long = rope.number("short_mscale"), rope.number("long_mscale")
    angles = table.long or LongAngles(int(rope.original_positions), table.inv_freq)
    has_two = table.long is not None or short != long
    return replace(table, mscale=short, long=replace(angles, mscale=long) if has_two else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhimoeMlp:
    num_experts: int
    width: int
    activation: Activation
    jitter: float

    @staticmethod
    def read(config: HfConfig) -> PhimoeMlp:
        return PhimoeMlp(
            num_experts=config.count("num_local_experts", 16),
            width=config.size("intermediate_size"),
            activation=config.activation("hidden_act", "silu"),
            jitter=config.number("router_jitter_noise", 0.01),
        )

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name = f"model.layers.{layer}.block_sparse_moe"
        logits = b.linear(x, f"{name}.gate", self.num_experts)
        return gated_experts(
            b,
            b.route(x, logits, EXPERTS_A_TOKEN, score="sparsemixer", jitter=self.jitter),
            f"{name}.experts",
            num_experts=self.num_experts,
            width=self.width,
            activation=self.activation,
            names=("w1", "w3", "w2"),
        )
