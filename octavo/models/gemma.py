"""Gemma: norms with weight + 1, embeddings scaled by sqrt(width), gelu gate. Gemma team 2024."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Frame, rms_norm
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program

TANH = "gelu_pytorch_tanh"


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("use_bidirectional_attention", False)
    shape = DecoderShape.read(config, num_kv_heads=16, head_dim=256, tied=True)
    bias = config.flag("attention_bias", False)
    activation = config.values.get("hidden_activation") or config.text("hidden_act", TANH)
    if activation == "gelu":  # early configs mean the tanh form; transformers does the same
        activation = TANH
    return build_llama(
        config.with_values(hidden_act=activation),
        shape=shape,
        qkv_bias=bias,
        out_bias=bias,
        frame=Frame(
            norm=rms_norm(shape.norm_eps, offset=1.0), embedding_scale=shape.hidden_size**0.5
        ),
    )
