"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts. GLM team 2026."""

from __future__ import annotations

from octavo.models.deepseek_v3 import DeepseekMlp, build_deepseek, count_dense_layers
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}
"""Values of missing keys that differ from DeepSeek-V3's."""


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    config.without_effect("head_dim")
    missing = {name: value for name, value in DEFAULTS.items() if name not in config.values}
    num_dense = count_dense_layers(config, 1)
    config.refuse_unless("first_k_dense_replace", num_dense)
    config = config.with_values(**missing, first_k_dense_replace=num_dense, head_dim=None)
    return build_deepseek(config, DeepseekMlp.read(config, scale=1.8, groups=(1, 1)))
