"""ERNIE 4.5's dense models: Llama with interleaved RoPE. Baidu 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.ernie4_5_moe import DEFAULT_THETA
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    bias = config.flag("use_bias", False)
    return build_llama(
        config,
        shape=DecoderShape.read(config, num_kv_heads=2, head_dim=128, norm_eps=1e-5, tied=True),
        theta=DEFAULT_THETA,
        interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )
