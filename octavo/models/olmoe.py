"""OLMoE: routed experts in every layer, q and k normed over all heads. Muennighoff et al. 2024."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.softmax_experts import SoftmaxExperts
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    experts = SoftmaxExperts(
        num_experts=config.count("num_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        normalize=config.flag("norm_topk_prob", False),
    )
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=DecoderShape.read(config, norm_eps=1e-5),
        qkv_bias=bias,
        out_bias=bias,
        row_norms=True,
        clip=config.optional_positive("clip_qkv"),
        mlp=lambda b, x, i: experts(b, x, f"model.layers.{i}.mlp"),
    )
