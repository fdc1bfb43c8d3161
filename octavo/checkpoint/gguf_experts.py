"""Routed experts in GGUF: the config's keys in a header, and the stems of the stacked tensors.

A GGUF file keeps all experts of a layer in one tensor `[E, out, in]`; "{}" in a name here stands
for the expert. Whether an architecture's weights are divided by their sum is not in the header,
but in llama.cpp's graph of it.
"""

from __future__ import annotations

from octavo.checkpoint.gguf_family import Config, Header

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


def has_experts(header: Header) -> bool:
    return bool(header.number("expert_count", 0))


def experts_config(header: Header, *, normalize: bool) -> Config:
    """Returns the keys of qwen2_moe, qwen3_moe and olmoe that are the experts' own."""
    return {
        "num_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "norm_topk_prob": normalize,
    }


def widths(header: Header) -> Config:
    """Returns the width of a routed expert, and that of the shared one where there is one."""
    shared = header.get("expert_shared_feed_forward_length")
    config = {"moe_intermediate_size": header.count("expert_feed_forward_length")}
    return config if shared is None else config | {"shared_expert_intermediate_size": shared}
