"""Routed experts in GGUF: config keys and names of the stacked tensors.

A GGUF file stacks all experts of a layer into one tensor `[E, out, in]`; "{}" in a name stands for
the expert. Whether routing weights are normalized is not in the header; it follows llama.cpp's
graph of the architecture.
"""

from __future__ import annotations

from octavo.checkpoint.gguf.gguf_family import Config, Header, rms_config

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
HUNYUAN_EXPERTS = EXPERTS | {
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
CORRECTION = "exp_probs_b"
"""Stem of the correction of DeepSeek-V3's scores; its safetensors name has no ".weight" suffix."""
SHARED_EXPERTS = {
    CORRECTION: "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def has_experts(header: Header) -> bool:
    return bool(header.number("expert_count", 0))


def experts_config(header: Header, *, normalize: bool) -> Config:
    """Returns the expert keys of qwen2_moe, qwen3_moe and olmoe."""
    return {
        "num_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "norm_topk_prob": normalize,
    }


def hunyuan_moe_config(header: Header) -> Config:
    return rms_config(header, experts=True) | {
        "intermediate_size": header.count("expert_feed_forward_length"),
        "num_experts": header.count("expert_count"),
        "moe_topk": header.count("expert_used_count"),
    }


def minimax_m2_config(header: Header) -> Config:
    return rms_config(header, experts=True) | {
        "intermediate_size": header.count("expert_feed_forward_length"),
        "num_local_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
    }


def shared_experts_config(header: Header) -> Config:
    """Returns the expert keys of DeepSeek-V3 and its relatives."""
    return {
        "n_routed_experts": header.count("expert_count"),
        "n_shared_experts": header.count("expert_shared_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "moe_intermediate_size": header.count("expert_feed_forward_length"),
        "first_k_dense_replace": header.number("leading_dense_block_count", 0),
        "routed_scaling_factor": float(header.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "n_group": header.count("expert_group_count", 1),
        "topk_group": header.count("expert_group_used_count", 1),
    }


def widths(header: Header) -> Config:
    """Returns the width of a routed expert, and of the shared one if there is one."""
    shared = header.get("expert_shared_feed_forward_length")
    config = {"moe_intermediate_size": header.count("expert_feed_forward_length")}
    return config if shared is None else config | {"shared_expert_intermediate_size": shared}
