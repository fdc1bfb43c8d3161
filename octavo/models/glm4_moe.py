"""GLM-4.5: Llama's attention with a partial rope, DeepSeek-V3's experts. GLM team 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.deepseek_v3 import DeepseekMlp
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("num_mtp_layers", "num_nextn_predict_layers")
    shape = DecoderShape.read(config, norm_eps=1e-5)
    rope = rope_parameters(config, partial=0.5).table(shape.head_dim)
    return build_llama(
        config,
        shape=shape,
        ropes=(rope,) * shape.num_layers,
        qkv_bias=config.flag("attention_bias", False),
        head_norms=config.flag("use_qk_norm", False),
        mlp=DeepseekMlp.read(config, first_routed=1, scale=1.0),
    )
