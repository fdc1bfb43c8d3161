"""DeepSeek-V2 and V2-Lite: latent attention; softmax routing without correction bias, limited to
expert groups in V2. DeepSeek-AI 2024.
"""

from __future__ import annotations

from octavo.models.deepseek_v3 import DeepseekMlp, build_deepseek
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("scoring_func", "softmax")
    config.refuse_unless("topk_method", "greedy", "group_limited_greedy")
    config.refuse_unless("norm_topk_prob", False)
    config.refuse_unless("mlp_bias", False)
    config.without_effect("head_dim", "n_group", "topk_group")
    config = config.with_values(norm_topk_prob=False)
    if config.text("topk_method", "greedy") == "greedy":
        config = config.with_values(n_group=1, topk_group=1)
    mlp = DeepseekMlp.read(
        config,
        first_routed=0,
        scale=1.0,
        score="softmax",
        num_shared=2,
        groups=(1, 1),
        group_rank="best",
    )
    return build_deepseek(config, mlp)
