"""Converts GGUF headers to Hugging Face configs, one function per family.

For values missing in a header, llama.cpp's defaults are used. Source: llama.cpp's
`gguf-py/gguf/constants.py` (keys) and its model implementations (defaults).
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.gguf.gguf_experts import (
    CORRECTION,
    experts_config,
    shared_experts_config,
    widths,
)
from octavo.checkpoint.gguf.gguf_family import (
    Config,
    Header,
    layer_norm_config,
    rms_config,
    windows_by_pattern,
)

GEMMA3_LOCAL_ROPE_THETA = 10000.0
GEMMA3_PERIOD = 6
GEMMA3_27B_LAYERS = 62
GEMMA3N_PERIOD = 5
GEMMA2_27B_LAYERS = 46
"""Layer counts of the two models that scale queries by hidden_size / heads instead of head_dim;
headers do not contain this property.
"""

SIGMOID = 2
"""llama.cpp's number of the sigmoid gating function of experts."""
LLAMA4_CHUNK = 8192
"""Positions per attention chunk; longer positions also scale the queries."""
LLAMA4_EXPERTS_WITHOUT_NORMS = 128
"""Number of experts of the model without QK norms (Maverick)."""


def llama_config(header: Header) -> Config:
    return rms_config(header) | {"mlp_bias": header.has("blk.0.ffn_up.bias")}


def qwen_config(header: Header) -> Config:
    return rms_config(header) | {"use_sliding_window": False}


def mixtral_config(header: Header) -> Config:
    experts = experts_config(header, normalize=True)
    return rms_config(header, experts=True) | {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "sliding_window": None,
    }


def qwen2_moe_config(header: Header) -> Config:
    config = rms_config(header, experts=True) | widths(header)
    config["qkv_bias"] = config.pop("attention_bias")
    return config | experts_config(header, normalize=False) | {"use_sliding_window": False}


def qwen3_moe_config(header: Header) -> Config:
    config = rms_config(header, experts=True) | widths(header)
    return config | experts_config(header, normalize=True) | {"use_sliding_window": False}


def ernie_moe_config(header: Header) -> Config:
    return rms_config(header, experts=True) | {
        "use_bias": header.has("blk.0.attn_q.bias"),
        "moe_num_experts": header.count("expert_count"),
        "moe_k": header.count("expert_used_count"),
        "moe_intermediate_size": header.count("expert_feed_forward_length"),
        "moe_num_shared_experts": header.number("expert_shared_count", 0),
        "moe_layer_start_index": header.number("leading_dense_block_count", 0),
        "moe_layer_interval": header.count("interleave_moe_layer_step", 1),
    }


def olmoe_config(header: Header) -> Config:
    return rms_config(header, experts=True) | experts_config(header, normalize=False)


def gemma_config(header: Header) -> Config:
    return rms_config(header) | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _query_scalar(config: Config, layers_of_27b: int) -> Config:
    by_width = config["num_hidden_layers"] == layers_of_27b
    width = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": width if by_width else config["head_dim"]}


def gemma2_config(header: Header) -> Config:
    config = gemma_config(header)
    return {
        **config,
        **_query_scalar(config, GEMMA2_27B_LAYERS),
        "sliding_window": header.count("attention.sliding_window"),
        "attn_logit_softcapping": header.get("attn_logit_softcapping"),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
    }


def gemma3_config(header: Header) -> Config:
    config = gemma_config(header)
    return {
        **config,
        **_query_scalar(config, GEMMA3_27B_LAYERS),
        **windows_by_pattern(header, GEMMA3_PERIOD),
        "rope_theta": float(header.number("rope.freq_base", 1000000.0)),
        "rope_local_base_freq": float(header.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA)),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def gemma3n_config(header: Header) -> Config:
    num_layers = header.num_blocks()
    feed_forward = by_layer(header, "feed_forward_length", 0, num_layers)
    return {
        **rms_config(header, widths=list(map(int, feed_forward))),
        **windows_by_pattern(header, GEMMA3N_PERIOD),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": float(header.number("rope.freq_base", 1000000.0)),
        "rope_local_base_freq": float(header.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA)),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "num_kv_shared_layers": header.number("attention.shared_kv_layers", 0),
        "altup_num_inputs": header.count("altup.num_inputs"),
        "altup_active_idx": header.number("altup.active_idx", 0),
        "altup_correct_scale": header.has("blk.0.altup_correct_scale.weight"),
        "hidden_size_per_layer_input": header.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": header.num_rows("per_layer_token_embd.weight"),
        "laurel_rank": header.num_rows("blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": [
            NormalDist().cdf(scale)
            for scale in by_layer(header, "activation_sparsity_scale", -math.inf, num_layers)
        ],
    }


def by_layer(header: Header, key: str, default: float, num_layers: int) -> list[float]:
    """Returns a number per layer; a header may have one for all layers."""
    value = header.get(key, default)
    if not isinstance(value, np.ndarray):
        return [header.number(key, default)] * num_layers
    if value.shape != (num_layers,):
        raise WeightMismatch(
            f"{header.file.path}: {header.architecture}.{key} has {value.size} numbers, expected"
            f" {num_layers}"
        )
    return [float(each) for each in value]


def phi_config(header: Header) -> Config:
    return layer_norm_config(header) | {"hidden_act": "gelu_new"}


def phi3_config(header: Header) -> Config:
    config = rms_config(header)
    return config | {
        "sliding_window": header.get("attention.sliding_window") or None,
        "original_max_position_embeddings": header.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def phimoe_config(header: Header) -> Config:
    config = rms_config(header, experts=True)
    if config["rope_scaling"] is not None:
        factor = config["rope_scaling"]["attention_factor"]
        config["rope_scaling"] |= {"short_mscale": factor, "long_mscale": factor}
    return config | {
        "sliding_window": header.get("attention.sliding_window") or None,
        "original_max_position_embeddings": header.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "num_local_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "lm_head_bias": header.has("output.bias"),
    }


def chatglm_config(header: Header) -> Config:
    config = rms_config(header)
    return {
        "padded_vocab_size": header.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": config["rope_theta"] / 10000.0,
        "seq_length": config["max_position_embeddings"],
        "add_qkv_bias": header.has("blk.0.attn_qkv.bias"),
    }


def gpt2_config(header: Header) -> Config:
    return {
        "n_embd": header.count("embedding_length"),
        "n_inner": header.count("feed_forward_length"),
        "n_layer": header.num_blocks(),
        "n_head": header.count("attention.head_count"),
        "n_positions": header.count("context_length"),
        "layer_norm_epsilon": header.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def starcoder_config(header: Header) -> Config:
    return gpt2_config(header) | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def starcoder2_config(header: Header) -> Config:
    return layer_norm_config(header, "norm_epsilon") | {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": header.has("blk.0.attn_q.bias"),
    }


def gpt_neox_config(header: Header) -> Config:
    return layer_norm_config(header) | {
        "hidden_act": "gelu",
        "attention_bias": header.has("blk.0.attn_qkv.bias"),
        "use_parallel_residual": bool(header.get("use_parallel_residual", True)),
    }


def gpt_oss_config(header: Header) -> Config:
    config = rms_config(header, experts=True)
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False  # not in headers; true of all models
    return {
        **config,
        **windows_by_pattern(header, 2),
        "intermediate_size": header.count("expert_feed_forward_length"),
        "num_local_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "separate_experts": True,
    }


def bloom_config(header: Header) -> Config:
    return layer_norm_config(header, "layer_norm_epsilon")


def mpt_config(header: Header) -> Config:
    hidden_size = header.count("embedding_length")
    return {
        "d_model": hidden_size,
        "n_layers": header.num_blocks(),
        "n_heads": header.count("attention.head_count"),
        "max_seq_len": header.count("context_length"),
        "layer_norm_epsilon": header.number("attention.layer_norm_epsilon"),
        "expansion_ratio": header.count("feed_forward_length") // hidden_size,
        "attn_config": {
            "alibi": bool(header.number("attention.max_alibi_bias", 0)),
            "alibi_bias_max": header.number("attention.max_alibi_bias", 8),
            "clip_qkv": header.get("attention.clamp_kqv"),
            "qk_ln": header.has("blk.0.attn_q_norm.weight"),
        },
    }


def falcon_config(header: Header) -> Config:
    config = layer_norm_config(header, "layer_norm_epsilon")
    kv_heads = config["num_key_value_heads"]
    return config | {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if header.has("blk.0.attn_norm_2.weight") else 1,
        "ffn_hidden_size": config["intermediate_size"],
        "bias": header.has("blk.0.attn_qkv.bias"),
        "alibi": False,
        "parallel_attn": True,
        "activation": "gelu",
    }


def stablelm_config(header: Header) -> Config:
    return layer_norm_config(header) | {
        "use_qkv_bias": header.has("blk.0.attn_q.bias"),
        "qk_layernorm": header.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not header.has("blk.0.ffn_norm.weight"),
    }


def olmo_config(header: Header) -> Config:
    return layer_norm_config(header) | {"clip_qkv": header.get("attention.clamp_kqv")}


def olmo3_config(header: Header) -> Config:
    return rms_config(header) | windows_by_pattern(header, 4)


def granite_config(header: Header) -> Config:
    return llama_config(header) | _granite_scales(header)


def _granite_scales(header: Header) -> Config:
    return {
        "attention_multiplier": header.number("attention.scale", 1.0),
        "embedding_multiplier": header.number("embedding_scale", 1.0),
        "residual_multiplier": header.number("residual_scale", 1.0),
        "logits_scaling": header.number("logit_scale", 1.0),
    }


def granitemoe_config(header: Header) -> Config:
    return {
        **rms_config(header, experts=True),
        **_granite_scales(header),
        "num_local_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "separate_experts": True,
    }


def glm4_moe_config(header: Header) -> Config:
    config = rms_config(header, experts=True) | shared_experts_config(header)
    predictors = header.number("nextn_predict_layers", 0)
    return config | {
        "num_hidden_layers": config["num_hidden_layers"] - predictors,
        "num_nextn_predict_layers": predictors,
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }


def deepseek_config(header: Header) -> Config:
    """Returns the config of DeepSeek's latent attention and experts.

    Headers have the head sizes of absorbed attention; the model's own sizes are under other keys,
    if present.
    """
    config = {**rms_config(header, experts=True), **shared_experts_config(header)}
    config.pop("partial_rotary_factor", None)
    head = header.count("attention.key_length_mla", config.pop("head_dim"))
    rotary = header.count("rope.dimension_count")
    value = header.count("attention.value_length_mla", header.count("attention.value_length", head))
    is_grouped = config["n_group"] > 1
    scaling = config["rope_scaling"]
    if scaling is not None and scaling.get("mscale") is not None:
        # The converter writes one tenth of the logarithm's factor.
        factor = float(np.float32(scaling["mscale"]) / np.float32(0.1))
        config["rope_scaling"] = scaling | {"mscale": factor, "mscale_all_dim": factor}
    return {
        **config,
        "num_key_value_heads": config["num_attention_heads"],
        "attention_bias": header.has("blk.0.attn_kv_a_mqa.bias"),
        "qk_nope_head_dim": head - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        "kv_lora_rank": header.count("attention.kv_lora_rank"),
        "q_lora_rank": header.get("attention.q_lora_rank"),
        "topk_method": "noaux_tc"
        if is_deepseek_v3(header)
        else "group_limited_greedy"
        if is_grouped
        else "greedy",
    }


def is_deepseek_v3(header: Header) -> bool:
    """Returns whether experts are chosen by a sigmoid with a correction."""
    return header.get("expert_gating_func") == SIGMOID or any(
        CORRECTION in name for name in header.file.tensors
    )


def llama4_config(header: Header) -> Config:
    config = rms_config(header, experts=True)
    num_experts = header.number("expert_count", 0)
    has_chunks = header.get("attention.sliding_window") != 0
    return {
        **config,
        "intermediate_size": header.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": header.count("interleave_moe_layer_step", 1),
        "num_local_experts": num_experts,
        "num_experts_per_tok": header.count("expert_used_count", 1),
        "separate_experts": True,
        "attention_chunk_size": LLAMA4_CHUNK if has_chunks else config["max_position_embeddings"],
        "attn_temperature_tuning": has_chunks,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "no_rope_layer_interval": 4 if has_chunks else config["num_hidden_layers"] + 1,
        "use_qk_norm": num_experts != LLAMA4_EXPERTS_WITHOUT_NORMS,
    }


def smollm3_config(header: Header) -> Config:
    return llama_config(header) | {"no_rope_layer_interval": 4}


def cohere_config(header: Header) -> Config:
    return layer_norm_config(header) | {
        "logit_scale": header.number("logit_scale"),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }


def cohere2_config(header: Header) -> Config:
    return cohere_config(header) | windows_by_pattern(header, 4)


def exaone4_config(header: Header) -> Config:
    windowed = header.get("attention.sliding_window") is not None
    return rms_config(header) | (
        windows_by_pattern(header, 4) if windowed else {"sliding_window": None}
    )


def ministral3_config(header: Header) -> Config:
    config = llama_config(header)
    scaling = config["rope_scaling"] or {}
    beta = header.get("attention.temperature_scale")
    return config | {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}


def seed_oss_config(header: Header) -> Config:
    return llama_config(header) | {"attention_out_bias": header.has("blk.0.attn_output.bias")}


def nemotron_config(header: Header) -> Config:
    return layer_norm_config(header, "norm_eps") | {
        "hidden_act": "relu2",
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
    }
