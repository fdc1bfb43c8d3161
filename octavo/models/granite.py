"""Granite: Llama with scaling factors on embeddings, residuals, scores and logits. IBM 2024."""

from __future__ import annotations

from octavo.models.decoder import Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        scale=config.positive("attention_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        frame=make_frame(config),
    )


def make_frame(config: HfConfig) -> Frame:
    """Returns the frame with Granite's factors."""
    return Frame(
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )
