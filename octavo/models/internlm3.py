"""InternLM3: Llama with separate bias options for attention and MLP. Shanghai AI Lab 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    renamed = config.renamed(attention_bias="qkv_bias", mlp_bias="bias")
    bias = renamed.flag("attention_bias", False)
    mlp_bias = renamed.flag("mlp_bias", bias)
    return build_llama(
        renamed,
        shape=DecoderShape.read(renamed, num_kv_heads=2, head_dim=128, norm_eps=1e-5),
        qkv_bias=bias,
        out_bias=mlp_bias,
        mlp_bias=mlp_bias,
    )
