"""LFM2: gated short convolutions, with grouped-query attention in some layers. Liquid AI 2025.

A convolution's previous rows are stored in a `conv` cache group, which works like a sliding window
of keys (docs/decisions/0023-convolutions-are-windows.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import (
    DecoderShape,
    Frame,
    LayerCache,
    NormNames,
    Sublayer,
    build_decoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.build_mixers import short_conv
from octavo.program.builder import Builder
from octavo.program.program import CacheGroup, Program, Value

MAX_TAPS = 64
"""Maximum number of taps of a convolution; published models have 3."""


def build(config: HfConfig) -> dict[str, Program]:
    _refuse_other_blocks(config, config.size("hidden_size"))
    width = feed_forward_width(config)
    return build_lfm2(config, lambda b, x, i: feed_forward(b, x, i, width))


def feed_forward(b: Builder, x: Value, layer: int, width: int) -> Value:
    """Appends a layer's gated MLP."""
    name = f"model.layers.{layer}.feed_forward"
    gate, up = (b.linear(x, f"{name}.{part}", width) for part in ("w1", "w3"))
    return b.linear(b.act_mul(gate, up, "silu"), f"{name}.w2", x.width)


def build_lfm2(config: HfConfig, mlp: Sublayer) -> dict[str, Program]:
    """Builds the decoder with the given MLP."""
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    shape = DecoderShape.read(
        config.with_values(tie_word_embeddings=tied),
        num_kv_heads=8,
        norm_eps=1e-5,
        eps_name="norm_eps",
    )
    is_attention = layers_with_attention(config, shape.num_layers)
    caches, groups = _plan_cache(config, shape, is_attention)
    rope = rope_parameters(config, default_theta=1_000_000.0).table(shape.head_dim)
    attention = SelfAttention(
        shape=shape,
        caches=caches,
        ropes=[rope] * shape.num_layers,
        scale=shape.head_dim**-0.5,
        out="out_proj",
        head_norms=True,
        norm_names=("q_layernorm", "k_layernorm"),
    )
    convolution = Convolution(caches, bias=config.flag("conv_bias", False))

    def mix(b: Builder, x: Value, layer: int) -> Value:
        return (attention if is_attention[layer] else convolution)(b, x, layer)

    frame = Frame(norms=NormNames("operator_norm", "ffn_norm"), final_norm="model.embedding_norm")
    return build_decoder(shape, groups, mix, mlp, frame)


@dataclass(frozen=True, slots=True)
class Convolution:
    """Gated short convolution: out(c * conv(b * x)), with (b, c, x) = in(rows)."""

    caches: list[LayerCache]
    bias: bool

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name = f"model.layers.{layer}.conv"
        width = x.width
        cache = self.caches[layer]
        before, after, rows = (
            linear_part(
                b, x, f"{name}.in_proj", Rows(width, 3 * width, part * width), bias=self.bias
            )
            for part in range(3)
        )
        gated = b.mul(before, rows)
        (mixed,) = short_conv(b, gated, f"{name}.conv", cache.group, cache.layer, bias=self.bias)
        return b.linear(b.mul(after, mixed), f"{name}.out_proj", width, bias=self.bias)


def feed_forward_width(config: HfConfig) -> int:
    """Returns the MLP width: two thirds of the config's value, times a factor, rounded up, as in
    transformers.
    """
    width = config.size("block_ff_dim", config.size("intermediate_size", 12288))
    multiple = config.size("block_multiple_of", 256)
    factor = config.positive("block_ffn_dim_multiplier", 1.0)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def layers_with_attention(config: HfConfig, num_layers: int) -> list[bool]:
    """Returns for each layer whether it has attention, from `layer_types` or `full_attn_idxs`."""
    indices = config.integers("full_attn_idxs")
    types = config.values.get("layer_types")
    if types is None:
        if config.values.get("full_attn_idxs") is None:
            return [True] * num_layers
        if any(not 0 <= index < num_layers for index in indices):
            raise UnsupportedModel(
                f"config.json: full_attn_idxs is {list(indices)}, expected 0 to"
                f" {num_layers - 1}, the layer indices"
            )
        return [layer in indices for layer in range(num_layers)]
    known = ("full_attention", "conv")
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {*known}:
        raise UnsupportedModel(
            f"config.json: layer_types is {types!r}, expected {num_layers} entries from"
            f" {', '.join(known)}"
        )
    return [kind == "full_attention" for kind in types]


def _plan_cache(
    config: HfConfig, shape: DecoderShape, is_attention: list[bool]
) -> tuple[list[LayerCache], tuple[CacheGroup, ...]]:
    """Assigns attention and convolutions to separate groups."""
    taps = config.integer("conv_L_cache", 3, low=1, high=MAX_TAPS)
    caches = [
        LayerCache(
            "full" if attends else "conv", is_attention[:layer].count(attends), mask="causal"
        )
        for layer, attends in enumerate(is_attention)
    ]
    num_attention, num_conv = is_attention.count(True), is_attention.count(False)
    heads = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
    groups = [CacheGroup("full", "full", num_attention, *heads)] if num_attention else []
    if num_conv:
        groups.append(CacheGroup("conv", "conv", num_conv, 1, shape.hidden_size, 0, window=taps))
    return caches, tuple(groups)


def _refuse_other_blocks(config: HfConfig, hidden_size: int) -> None:
    """Rejects options of early configs that no published model uses, and ignores redundant ones."""
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        config.refuse_unless(name, hidden_size)
    config.refuse_unless("block_use_swiglu", True)
    config.refuse_unless("use_pos_enc", True)
    config.without_effect("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale")
    config.without_effect("block_use_xavier_init", "conv_use_xavier_init", "num_heads", "theta")
