"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts. GLM team 2026."""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.deepseek_v3 import DeepseekMlp, build_deepseek
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
    num_dense = _num_dense_layers(config)
    config.refuse_unless("first_k_dense_replace", num_dense)
    config = config.with_values(**missing, first_k_dense_replace=num_dense, head_dim=None)
    return build_deepseek(config, DeepseekMlp.read(config, scale=1.8, groups=(1, 1)))


def _num_dense_layers(config: HfConfig) -> int:
    """Returns the number of first layers without experts."""
    types = config.values.get("mlp_layer_types")
    if types is None:
        return 1
    num_layers = config.count("num_hidden_layers")
    num_dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise UnsupportedModel(
            f"config.json: mlp_layer_types is {types!r:.80}, expected {num_layers} of dense, then"
            f" sparse"
        )
    return num_dense
