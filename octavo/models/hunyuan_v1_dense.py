"""Hunyuan's dense models: Llama with head norms after RoPE, whose base may be stretched by `alpha`.
Tencent 2025.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Sublayer
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    return build_hunyuan(config)


def build_hunyuan(config: HfConfig, mlp: Sublayer | None = None) -> dict[str, Program]:
    """Builds the decoder; None means a gated MLP."""
    config.refuse_unless("use_qk_norm", True)
    config.refuse_unless("use_cla", False)
    config.without_effect("cla_share_factor", "eod_token_id")
    config = config.renamed(head_dim="attention_head_dim")
    shape = DecoderShape.read(config, norm_eps=1e-5)
    bias = config.flag("attention_bias", False)
    return build_llama(
        _with_base(config, shape.head_dim),
        shape=shape,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        norm_names=("query_layernorm", "key_layernorm"),
        norms_last=True,
        mlp=mlp,
    )


def _with_base(config: HfConfig, head_dim: int) -> HfConfig:
    """Returns the config with `alpha` folded into the base: theta * alpha^(D / (D - 2))."""
    given = dict(config.table("rope_scaling") or config.table("rope_parameters"))
    alpha = given.pop("alpha", None)
    if not alpha or (given.get("rope_type") or given.get("type")) != "dynamic":
        return config
    scaling = HfConfig({"model_type": config.model_type, "alpha": alpha, **given})
    theta = scaling.positive("rope_theta", config.positive("rope_theta", 10_000.0))
    base = theta * scaling.positive("alpha") ** (head_dim / (head_dim - 2))
    return config.with_values(rope_scaling=None, rope_parameters={"rope_theta": base})
