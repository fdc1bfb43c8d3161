"""GLM-4-0414: GLM with norms after each sublayer too. GLM team 2025."""

from __future__ import annotations

from octavo.models.decoder import NormNames
from octavo.models.glm import build_glm
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program

NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)


def build(config: HfConfig) -> dict[str, Program]:
    return build_glm(config, NORMS)
