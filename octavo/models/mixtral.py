"""Mixtral: Mistral's attention, routed experts in every layer. Jiang et al. 2024."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.softmax_experts import SoftmaxExperts
from octavo.program.program import Program

DEFAULT_THETA = 1e6


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("router_jitter_noise")  # noise used only in training
    experts = SoftmaxExperts(
        num_experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.size("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        normalize=True,
        names=("w1", "w3", "w2"),
    )
    shape = DecoderShape.read(config, num_kv_heads=8, norm_eps=1e-5)
    window = config.optional_integer("sliding_window")
    return build_llama(
        config,
        shape=shape,
        windows=config.layer_windows(shape.num_layers, window, lambda i: True),
        theta=DEFAULT_THETA,
        mlp=lambda b, x, i: experts(b, x, f"model.layers.{i}.block_sparse_moe"),
    )
