"""Seed-OSS: Llama with biases on q, k and v. ByteDance Seed 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    return build_llama(
        config,
        shape=DecoderShape.read(config, num_kv_heads=8, head_dim=128),
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
