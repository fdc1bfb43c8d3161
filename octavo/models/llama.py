"""Llama 2 and 3, SmolLM2, TinyLlama and other models of model_type llama. Touvron et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.decoder import (
    PLAIN,
    DecoderShape,
    Frame,
    Sublayer,
    build_decoder,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.rope import DEFAULT_THETA, rope_parameters
from octavo.models.self_attention import OwnNorms, SelfAttention
from octavo.program.ops import RopeTable
from octavo.program.program import Program, Weight


def build(config: HfConfig) -> dict[str, Program]:
    bias = config.flag("attention_bias", False)
    return build_llama(
        config, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", False)
    )


def build_llama(
    config: HfConfig,
    *,
    shape: DecoderShape | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeTable | None] | None = None,
    theta: float = DEFAULT_THETA,
    scale: float | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    row_norms: bool = False,
    own_norms: OwnNorms = "",
    norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    norms_last: bool = False,
    interleaved: bool = False,
    clip: float | None = None,
    growth: Weight | None = None,
    mlp: Sublayer | None = None,
    frame: Frame = PLAIN,
) -> dict[str, Program]:
    """Builds Llama's decoder with variations.

    None means Llama's own: its shape, no window, one RoPE table with base `theta`, scale 1 /
    sqrt(head_dim), a gated MLP.
    """
    shape = shape or DecoderShape.read(config)
    cache = plan_cache(shape, windows or (None,) * shape.num_layers)
    if ropes is None:
        rope = rope_parameters(config, default_theta=theta).table(shape.head_dim)
        ropes = (rope,) * shape.num_layers
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=ropes,
        scale=shape.head_dim**-0.5 if scale is None else scale,
        rope_style="interleaved" if interleaved else "half",
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norms=head_norms,
        row_norms=row_norms,
        own_norms=own_norms,
        norm_names=norm_names,
        norms_last=norms_last,
        clip=clip,
        growths=(growth,) * shape.num_layers,
    )
    mlp = mlp or _dense_mlp(config, bias=mlp_bias)
    return build_decoder(shape, cache.groups, attention, mlp, frame)


def _dense_mlp(config: HfConfig, *, bias: bool) -> Sublayer:
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    return lambda b, x, i: gated_mlp(b, x, f"model.layers.{i}.mlp", width, activation, bias=bias)
