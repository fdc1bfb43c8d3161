"""Qwen3, dense: Llama with q and k head norms. Qwen team 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.qwen2 import upper_windows
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        windows=upper_windows(config),
        qkv_bias=bias,
        out_bias=bias,
        shape=DecoderShape.read(config, num_kv_heads=32, head_dim=128),
        head_norms=True,
    )
