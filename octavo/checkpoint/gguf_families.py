"""GGUF headers of each model family in Hugging Face's words: config keys, tensor names, row orders.

One `Family` a GGUF architecture. What a header does not say is what llama.cpp computes. Source:
llama.cpp's `gguf-py/gguf/constants.py` and `tensor_mapping.py` (keys, names), its converter (row
orders, norms plus one), and its models (what headers leave out).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoint.gguf_experts import (
    EXPERTS,
    MIXTRAL_EXPERTS,
    SHARED_EXPERT,
    experts_config,
    has_experts,
    widths,
)
from octavo.checkpoint.gguf_family import (
    Config,
    Family,
    Header,
    by_head,
    by_kv_head,
    halves,
    layer_norm_config,
    rms_config,
    windows_by_pattern,
)

GEMMA3_LOCAL_ROPE_THETA = 10000.0
GEMMA3_PERIOD = 6
GEMMA3_27B_LAYERS = 62
GEMMA2_27B_LAYERS = 46
"""Numbers of layers of the two models whose queries are scaled by hidden_size / heads instead of
head_dim; headers do not say so.
"""


def _llama_config(header: Header) -> Config:
    return rms_config(header) | {"mlp_bias": header.has("blk.0.ffn_up.bias")}


def _qwen_config(header: Header) -> Config:
    return rms_config(header) | {"use_sliding_window": False}


def _mixtral_config(header: Header) -> Config:
    experts = experts_config(header, normalize=True)
    return rms_config(header, experts=True) | {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "sliding_window": None,
    }


def _qwen2_moe_config(header: Header) -> Config:
    config = rms_config(header, experts=True) | widths(header)
    config["qkv_bias"] = config.pop("attention_bias")
    return config | experts_config(header, normalize=False) | {"use_sliding_window": False}


def _qwen3_moe_config(header: Header) -> Config:
    config = rms_config(header, experts=True) | widths(header)
    return config | experts_config(header, normalize=True) | {"use_sliding_window": False}


def _olmoe_config(header: Header) -> Config:
    return rms_config(header, experts=True) | experts_config(header, normalize=False)


def _gemma_config(header: Header) -> Config:
    return rms_config(header) | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _query_scalar(config: Config, layers_of_27b: int) -> Config:
    by_width = config["num_hidden_layers"] == layers_of_27b
    width = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": width if by_width else config["head_dim"]}


def _gemma2_config(header: Header) -> Config:
    config = _gemma_config(header)
    return {
        **config,
        **_query_scalar(config, GEMMA2_27B_LAYERS),
        "sliding_window": header.count("attention.sliding_window"),
        "attn_logit_softcapping": header.get("attn_logit_softcapping"),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
    }


def _gemma3_config(header: Header) -> Config:
    config = _gemma_config(header)
    return {
        **config,
        **_query_scalar(config, GEMMA3_27B_LAYERS),
        **windows_by_pattern(header, GEMMA3_PERIOD),
        "rope_theta": float(header.number("rope.freq_base", 1000000.0)),
        "rope_local_base_freq": float(header.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA)),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _phi_config(header: Header) -> Config:
    return layer_norm_config(header) | {"hidden_act": "gelu_new"}


def _phi3_config(header: Header) -> Config:
    config = rms_config(header)
    return config | {
        "sliding_window": header.get("attention.sliding_window") or None,
        "original_max_position_embeddings": header.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _chatglm_config(header: Header) -> Config:
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


def _gpt2_config(header: Header) -> Config:
    return {
        "n_embd": header.count("embedding_length"),
        "n_inner": header.count("feed_forward_length"),
        "n_layer": header.num_blocks(),
        "n_head": header.count("attention.head_count"),
        "n_positions": header.count("context_length"),
        "layer_norm_epsilon": header.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _starcoder_config(header: Header) -> Config:
    return _gpt2_config(header) | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def _starcoder2_config(header: Header) -> Config:
    return layer_norm_config(header, "norm_epsilon") | {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": header.has("blk.0.attn_q.bias"),
    }


def _gpt_neox_config(header: Header) -> Config:
    return layer_norm_config(header) | {
        "hidden_act": "gelu",
        "attention_bias": header.has("blk.0.attn_qkv.bias"),
        "use_parallel_residual": bool(header.get("use_parallel_residual", True)),
    }


def _bloom_config(header: Header) -> Config:
    return layer_norm_config(header, "layer_norm_epsilon")


def _mpt_config(header: Header) -> Config:
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


def _falcon_config(header: Header) -> Config:
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


def _stablelm_config(header: Header) -> Config:
    return layer_norm_config(header) | {
        "use_qkv_bias": header.has("blk.0.attn_q.bias"),
        "qk_layernorm": header.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not header.has("blk.0.ffn_norm.weight"),
    }


def _olmo_config(header: Header) -> Config:
    return layer_norm_config(header) | {"clip_qkv": header.get("attention.clamp_kqv")}


def _olmo3_config(header: Header) -> Config:
    return rms_config(header) | windows_by_pattern(header, 4)


def _granite_config(header: Header) -> Config:
    return _llama_config(header) | {
        "attention_multiplier": header.number("attention.scale", 1.0),
        "embedding_multiplier": header.number("embedding_scale", 1.0),
        "residual_multiplier": header.number("residual_scale", 1.0),
        "logits_scaling": header.number("logit_scale", 1.0),
    }


def _smollm3_config(header: Header) -> Config:
    return _llama_config(header) | {"no_rope_layer_interval": 4}


def _cohere_config(header: Header) -> Config:
    return layer_norm_config(header) | {
        "logit_scale": header.number("logit_scale"),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }


def _cohere2_config(header: Header) -> Config:
    return _cohere_config(header) | windows_by_pattern(header, 4)


def _exaone4_config(header: Header) -> Config:
    windowed = header.get("attention.sliding_window") is not None
    return rms_config(header) | (
        windows_by_pattern(header, 4) if windowed else {"sliding_window": None}
    )


def _ministral3_config(header: Header) -> Config:
    config = _llama_config(header)
    scaling = config["rope_scaling"] or {}
    beta = header.get("attention.temperature_scale")
    return config | {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}


def _seed_oss_config(header: Header) -> Config:
    return _llama_config(header) | {"attention_out_bias": header.has("blk.0.attn_output.bias")}


def _nemotron_config(header: Header) -> Config:
    return layer_norm_config(header, "norm_eps") | {
        "hidden_act": "relu2",
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
    }


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SIDES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PLAIN_MLP = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_PAIRS = {"attn_q": halves("num_attention_heads"), "attn_k": halves("num_key_value_heads")}
_GATE_AND_UP = {"ffn_up": "mlp.gate_up_proj"}

_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BIGSCIENCE_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BIGSCIENCE_BLOCK = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    **_PLAIN_MLP,
}

_LLAMA = Family("llama", _llama_config, _TOP, _BLOCK, row_orders=_PAIRS)
_MIXTRAL = Family("mixtral", _mixtral_config, _TOP, _BLOCK | MIXTRAL_EXPERTS, row_orders=_PAIRS)
_FALCON = Family(
    "falcon",
    _falcon_config,
    _BIGSCIENCE_TOP,
    _BIGSCIENCE_BLOCK | {"attn_norm": "input_layernorm"},
    layer_prefix="transformer.h",
    row_orders={"attn_qkv": by_kv_head},
)
_FALCON_40B = replace(
    _FALCON, layer_tensors=_BIGSCIENCE_BLOCK | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)
_CHATGLM = Family(
    "chatglm",
    _chatglm_config,
    {
        "token_embd": "transformer.embedding.word_embeddings",
        "output_norm": "transformer.encoder.final_layernorm",
        "output": "transformer.output_layer",
    },
    _SIDES
    | _PLAIN_MLP
    | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
    layer_prefix="transformer.encoder.layers",
)
_OLMO2 = Family("olmo2", rms_config, _TOP, _BLOCK | _HEAD_NORMS | _NORMS_AFTER)

FAMILIES: dict[str, Family] = {
    "llama": replace(_LLAMA, variants=((has_experts, _MIXTRAL),)),
    "qwen2": Family("qwen2", _qwen_config, _TOP, _BLOCK),
    "qwen2moe": Family("qwen2_moe", _qwen2_moe_config, _TOP, _BLOCK | EXPERTS | SHARED_EXPERT),
    "qwen3moe": Family("qwen3_moe", _qwen3_moe_config, _TOP, _BLOCK | _HEAD_NORMS | EXPERTS),
    "olmoe": Family("olmoe", _olmoe_config, _TOP, _BLOCK | _HEAD_NORMS | EXPERTS),
    "qwen3": Family("qwen3", _qwen_config, _TOP, _BLOCK | _HEAD_NORMS),
    "gemma": Family("gemma", _gemma_config, _TOP, _BLOCK, norm_offset=1.0),
    "gemma2": Family("gemma2", _gemma2_config, _TOP, _BLOCK | _NORMS_AROUND, norm_offset=1.0),
    "gemma3": Family(
        "gemma3_text",
        _gemma3_config,
        _TOP,
        _BLOCK | _HEAD_NORMS | _NORMS_AROUND,
        norm_offset=1.0,
    ),
    "phi2": Family(
        "phi",
        _phi_config,
        _TOP | {"output_norm": "model.final_layernorm"},
        _BLOCK | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "phi3": Family(
        "phi3", _phi3_config, _TOP, _BLOCK | {"attn_qkv": "self_attn.qkv_proj"} | _GATE_AND_UP
    ),
    "chatglm": Family(
        "glm",
        rms_config,
        _TOP,
        _BLOCK | _GATE_AND_UP,
        variants=((lambda header: header.has("blk.0.attn_qkv.weight"), _CHATGLM),),
    ),
    "glm4": Family(
        "glm4",
        rms_config,
        _TOP,
        _BLOCK
        | _GATE_AND_UP
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "gpt2": Family("gpt2", _gpt2_config, _GPT2_TOP, _GPT2_BLOCK, layer_prefix="transformer.h"),
    "starcoder": Family(
        "gpt_bigcode", _starcoder_config, _GPT2_TOP, _GPT2_BLOCK, layer_prefix="transformer.h"
    ),
    "starcoder2": Family(
        "starcoder2",
        _starcoder2_config,
        _TOP,
        _BLOCK | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gptneox": Family(
        "gpt_neox",
        _gpt_neox_config,
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        _SIDES
        | _PLAIN_MLP
        | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        layer_prefix="gpt_neox.layers",
        row_orders={"attn_qkv": by_head},
    ),
    "bloom": Family(
        "bloom",
        _bloom_config,
        _BIGSCIENCE_TOP,
        _BIGSCIENCE_BLOCK | _SIDES,
        layer_prefix="transformer.h",
        row_orders={"attn_qkv": by_head},
    ),
    "mpt": Family(
        "mpt",
        _mpt_config,
        {
            "token_embd": "transformer.wte",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        layer_prefix="transformer.blocks",
    ),
    "falcon": replace(
        _FALCON,
        variants=((lambda header: header.has("blk.0.attn_norm_2.weight"), _FALCON_40B),),
    ),
    "stablelm": Family("stablelm", _stablelm_config, _TOP, _BLOCK),
    "olmo": Family("olmo", _olmo_config, _TOP, _BLOCK, row_orders=_PAIRS),
    "olmo2": replace(
        _OLMO2,
        variants=(
            (
                lambda header: header.get("attention.sliding_window") is not None,
                replace(_OLMO2, model_type="olmo3", config=_olmo3_config),
            ),
        ),
    ),
    "granite": replace(_LLAMA, model_type="granite", config=_granite_config),
    "smollm3": replace(_LLAMA, model_type="smollm3", config=_smollm3_config),
    "command-r": Family("cohere", _cohere_config, _TOP, _BLOCK),
    "cohere2": Family("cohere2", _cohere2_config, _TOP, _BLOCK),
    "exaone4": Family("exaone4", _exaone4_config, _TOP, _BLOCK | _HEAD_NORMS | _NORMS_AFTER),
    "mistral3": replace(_LLAMA, model_type="ministral3", config=_ministral3_config),
    "seed_oss": Family(
        "seed_oss",
        _seed_oss_config,
        _TOP,
        _BLOCK | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "nemotron": Family("nemotron", _nemotron_config, _TOP, _BLOCK, norm_offset=1.0),
}
"""All families by `general.architecture`."""
