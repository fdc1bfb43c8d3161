"""Llama 4's decoder: RoPE in most layers, and experts whose inputs are scaled by the sigmoid of
their scores. Meta 2025.

Layers with RoPE use chunked attention (`attention_chunk_size`); in the other layers, queries are
scaled by position if `attn_temperature_tuning` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, build_decoder, plan_cache, query_growth
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_experts, gated_mlp, stacked_experts
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.models.smollm3 import layers_with_rope
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import Growth, Program, Value, Weight

DEFAULT_THETA = 500_000.0
DEFAULT_CHUNK = 8192
"""Chunk length; also the position from which queries are scaled."""
LAYER_TYPES = frozenset({"chunked_attention", "full_attention"})


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("router_jitter_noise")
    shape = DecoderShape.read(config, num_kv_heads=8, head_dim=128, norm_eps=1e-5)
    turned = layers_with_rope(config, shape.num_layers)
    cache = plan_cache(shape, _chunks(config, turned), chunks=True)
    rope = rope_parameters(config, default_theta=DEFAULT_THETA).table(shape.head_dim)
    growth, bias = _growth(config), config.flag("attention_bias", False)
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=[rope if each else None for each in turned],
        growths=[None if each else growth for each in turned],
        scale=shape.head_dim**-0.5,
        rope_style="interleaved",
        qkv_bias=bias,
        out_bias=bias,
        turned_norms=config.flag("use_qk_norm", True),
    )
    return build_decoder(shape, cache.groups, attention, Llama4Mlp.read(config, shape.num_layers))


def _chunks(config: HfConfig, turned: Sequence[bool]) -> tuple[int | None, ...]:
    """Returns each layer's chunk length; None for full attention, which includes every layer if the
    context fits one chunk.
    """
    length = config.integer("attention_chunk_size", DEFAULT_CHUNK, low=1)
    types = config.values.get("layer_types") or [
        "chunked_attention" if each else "full_attention" for each in turned
    ]
    if (
        not isinstance(types, list)
        or len(types) != len(turned)
        or set(map(str, types)) - LAYER_TYPES
    ):
        raise UnsupportedModel(
            f"config.json: layer_types is {types!r:.80}, expected {len(turned)} entries from"
            f" {', '.join(sorted(LAYER_TYPES))}"
        )
    whole = config.integer("max_position_embeddings", low=1) <= length
    return tuple(None if whole or kind == "full_attention" else length for kind in types)


def _growth(config: HfConfig) -> Weight | None:
    """Returns the query scaling table of layers without RoPE."""
    floor = config.integer("floor_scale", DEFAULT_CHUNK, low=1)
    slope = config.number("attn_scale", 0.1)
    if not config.values.get("attn_temperature_tuning", True):  # older configs have a number here
        return None
    positions = config.integer("max_position_embeddings", low=1)
    return query_growth(positions, Growth(floor, slope, shift=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Mlp:
    """Llama 4's MLPs: dense, or one shared and routed experts in `moe_layers`."""

    num_experts: int
    top_k: int
    width: int
    dense_width: int
    activation: Activation
    moe_layers: frozenset[int]
    separate: bool
    """Whether each expert's matrices are separate tensors, as in GGUF."""

    @staticmethod
    def read(config: HfConfig, num_layers: int) -> Llama4Mlp:
        step = config.count("interleave_moe_layer_step", 1)
        given = config.values.get("moe_layers")
        every = range(step - 1, num_layers, step)
        return Llama4Mlp(
            num_experts=config.count("num_local_experts", 16),
            top_k=config.count("num_experts_per_tok", 1),
            width=config.size("intermediate_size"),
            dense_width=config.size("intermediate_size_mlp", 16384),
            activation=config.activation("hidden_act", "silu"),
            moe_layers=frozenset(every if given is None else config.integers("moe_layers")),
            separate=config.flag("separate_experts", False),
        )

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name = f"model.layers.{layer}.feed_forward"
        if layer not in self.moe_layers:
            return gated_mlp(b, x, name, self.dense_width, self.activation)
        shared = gated_mlp(b, x, f"{name}.shared_expert", self.width, self.activation)
        return b.add(shared, self._route(b, x, name))

    def _route(self, b: Builder, x: Value, name: str) -> Value:
        logits = b.linear(x, f"{name}.router", self.num_experts)
        routed = b.route(x, logits, self.top_k, score="sigmoid_top_k", scales_rows=True)
        append = gated_experts if self.separate else stacked_experts
        return append(
            b,
            routed,
            f"{name}.experts",
            num_experts=self.num_experts,
            width=self.width,
            activation=self.activation,
        )
