"""OLMo 2: post-norm only, q and k normed over all heads. OLMo team 2024."""

from __future__ import annotations

from octavo.models.decoder import AFTER_ONLY, DecoderShape, Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=DecoderShape.read(config, norm_eps=1e-5),
        qkv_bias=bias,
        out_bias=bias,
        row_norms=True,
        frame=Frame(norms=AFTER_ONLY),
    )
