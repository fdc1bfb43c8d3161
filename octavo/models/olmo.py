"""OLMo: Llama with norms without weights. Groeneveld et al. 2024."""

from __future__ import annotations

from octavo.models.decoder import Frame, layer_norm
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        qkv_bias=bias,
        out_bias=bias,
        clip=config.optional_positive("clip_qkv"),
        frame=Frame(norm=layer_norm(1e-5, bias=False, weight=False)),
    )
