"""DeepSeek-V2 and V2-Lite: latent attention; experts chosen by a softmax, without correction.
DeepSeek-AI 2024.
"""

from __future__ import annotations

from octavo.models.deepseek_v3 import DeepseekMlp, build_deepseek
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("scoring_func", "softmax")
    config.refuse_unless("topk_method", "greedy")
    config.refuse_unless("norm_topk_prob", False)
    config.refuse_unless("mlp_bias", False)
    config.without_effect("head_dim", "n_group", "topk_group")  # groups limit no greedy choice
    config = config.having(n_group=1, topk_group=1, norm_topk_prob=False)
    mlp = DeepseekMlp.read(config, first_routed=0, scale=1.0, score="softmax")
    return build_deepseek(config, mlp)
