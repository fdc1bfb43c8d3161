"""Mapping from GGUF architectures to Hugging Face families: config keys, tensor names, row orders.

For values missing in a header, llama.cpp's defaults are used. Sources: llama.cpp's
`gguf-py/gguf/constants.py` and `tensor_mapping.py` (keys, names), its converter (row orders, norms
plus one) and its model implementations (defaults).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.checkpoint.gguf.gguf_configs import (
    bloom_config,
    chatglm_config,
    cohere2_config,
    cohere_config,
    deepseek_config,
    ernie_moe_config,
    exaone4_config,
    falcon_config,
    gemma2_config,
    gemma3_config,
    gemma3n_config,
    gemma_config,
    glm4_moe_config,
    gpt2_config,
    gpt_neox_config,
    gpt_oss_config,
    granite_config,
    granitemoe_config,
    is_deepseek_v3,
    llama4_config,
    llama_config,
    ministral3_config,
    mixtral_config,
    mpt_config,
    nemotron_config,
    olmo3_config,
    olmo_config,
    olmoe_config,
    phi3_config,
    phi_config,
    phimoe_config,
    qwen2_moe_config,
    qwen3_moe_config,
    qwen_config,
    seed_oss_config,
    smollm3_config,
    stablelm_config,
    starcoder2_config,
    starcoder_config,
)
from octavo.checkpoint.gguf.gguf_deltas import DELTA_FAMILIES
from octavo.checkpoint.gguf.gguf_encoders import ENCODER_FAMILIES
from octavo.checkpoint.gguf.gguf_experts import (
    CORRECTION,
    EXPERTS,
    GRANITE_EXPERTS,
    HUNYUAN_EXPERTS,
    MIXTRAL_EXPERTS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    has_experts,
    hunyuan_moe_config,
    minimax_m2_config,
)
from octavo.checkpoint.gguf.gguf_family import (
    TOP,
    Family,
    Joined,
    by_head,
    by_kv_head,
    halves,
    rms_config,
)
from octavo.checkpoint.gguf.gguf_gemma4 import gemma4_config
from octavo.checkpoint.gguf.gguf_states import STATE_FAMILIES

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
_LAST_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PREDICTOR = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_PER_LAYER_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
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

_LLAMA = Family("llama", llama_config, TOP, _BLOCK, row_orders=_PAIRS)
_MIXTRAL = Family("mixtral", mixtral_config, TOP, _BLOCK | MIXTRAL_EXPERTS, row_orders=_PAIRS)
_FALCON = Family(
    "falcon",
    falcon_config,
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
    chatglm_config,
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


_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    deepseek_config,
    TOP,
    _BLOCK
    | EXPERTS
    | SHARED_EXPERTS
    | _PREDICTOR
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    },
    whole_names=frozenset({CORRECTION}),
    joined={
        "self_attn.kv_b_proj.weight": Joined(
            ("attn_k_b", "attn_v_b"),
            lambda keys, values: (keys[0] * (keys[2] + values[1]), keys[1]),
            lambda keys, values: np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(
                -1, keys.shape[1]
            ),
        )
    },
)
"""Older files have attn_kv_b; newer ones have its transposed keys and its values."""
_QWEN2 = Family("qwen2", qwen_config, TOP, _BLOCK)
_QWEN3 = Family("qwen3", qwen_config, TOP, _BLOCK | _HEAD_NORMS)
_QWEN3_MOE = Family("qwen3_moe", qwen3_moe_config, TOP, _BLOCK | _HEAD_NORMS | EXPERTS)
"""Text needs no M-RoPE: its positions are equal on all axes."""
_OLMO2 = Family("olmo2", rms_config, TOP, _BLOCK | _HEAD_NORMS | _NORMS_AFTER)

FAMILIES: dict[str, Family] = {
    **STATE_FAMILIES,
    **DELTA_FAMILIES,
    **ENCODER_FAMILIES,
    "llama": replace(_LLAMA, variants=((has_experts, _MIXTRAL),)),
    "qwen2": _QWEN2,
    "qwen2vl": _QWEN2,
    "qwen2moe": Family("qwen2_moe", qwen2_moe_config, TOP, _BLOCK | EXPERTS | SHARED_EXPERT),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "olmoe": Family("olmoe", olmoe_config, TOP, _BLOCK | _HEAD_NORMS | EXPERTS),
    "qwen3": _QWEN3,
    "qwen3vl": _QWEN3,
    "gemma": Family("gemma", gemma_config, TOP, _BLOCK, norm_offset=1.0),
    "gemma2": Family("gemma2", gemma2_config, TOP, _BLOCK | _NORMS_AROUND, norm_offset=1.0),
    "gemma3": Family(
        "gemma3_text",
        gemma3_config,
        TOP,
        _BLOCK | _HEAD_NORMS | _NORMS_AROUND,
        norm_offset=1.0,
    ),
    "gemma3n": Family(
        "gemma3n_text",
        gemma3n_config,
        TOP
        | _PER_LAYER_TOP
        | {
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        _BLOCK
        | _HEAD_NORMS
        | _NORMS_AROUND
        | _PER_LAYER
        | {
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        whole_names=frozenset({"altup_correct_scale"}),
    ),
    "gemma4": Family(
        "gemma4_text",
        gemma4_config,
        TOP | _PER_LAYER_TOP,
        _BLOCK | _HEAD_NORMS | _NORMS_AROUND | _PER_LAYER | {"layer_output_scale": "layer_scalar"},
        whole_names=frozenset({"layer_output_scale"}),
    ),
    "phi2": Family(
        "phi",
        phi_config,
        TOP | {"output_norm": "model.final_layernorm"},
        _BLOCK | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "phi3": Family(
        "phi3", phi3_config, TOP, _BLOCK | {"attn_qkv": "self_attn.qkv_proj"} | _GATE_AND_UP
    ),
    "phimoe": Family("phimoe", phimoe_config, TOP, _BLOCK | MIXTRAL_EXPERTS),
    "chatglm": Family(
        "glm",
        rms_config,
        TOP,
        _BLOCK | _GATE_AND_UP,
        variants=((lambda header: header.has("blk.0.attn_qkv.weight"), _CHATGLM),),
    ),
    "glm4": Family(
        "glm4",
        rms_config,
        TOP,
        _BLOCK
        | _GATE_AND_UP
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "gpt2": Family("gpt2", gpt2_config, _GPT2_TOP, _GPT2_BLOCK, layer_prefix="transformer.h"),
    "gpt-oss": Family(
        "gpt_oss",
        gpt_oss_config,
        TOP,
        _BLOCK
        | EXPERTS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        whole_names=frozenset({"attn_sinks"}),
    ),
    "ernie4_5": Family("ernie4_5", rms_config, TOP, _BLOCK),
    "hunyuan-dense": Family("hunyuan_v1_dense", rms_config, TOP, _BLOCK | _LAST_NORMS),
    "hunyuan-moe": Family(
        "hunyuan_v1_moe", hunyuan_moe_config, TOP, _BLOCK | _LAST_NORMS | HUNYUAN_EXPERTS
    ),
    "minimax-m2": Family(
        "minimax_m2",
        minimax_m2_config,
        TOP,
        _BLOCK
        | _HEAD_NORMS
        | MIXTRAL_EXPERTS
        | {CORRECTION: "block_sparse_moe.e_score_correction_bias"},
        whole_names=frozenset({CORRECTION}),
    ),
    "starcoder": Family(
        "gpt_bigcode", starcoder_config, _GPT2_TOP, _GPT2_BLOCK, layer_prefix="transformer.h"
    ),
    "starcoder2": Family(
        "starcoder2",
        starcoder2_config,
        TOP,
        _BLOCK | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gptneox": Family(
        "gpt_neox",
        gpt_neox_config,
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
        bloom_config,
        _BIGSCIENCE_TOP,
        _BIGSCIENCE_BLOCK | _SIDES,
        layer_prefix="transformer.h",
        row_orders={"attn_qkv": by_head},
    ),
    "mpt": Family(
        "mpt",
        mpt_config,
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
    "stablelm": Family("stablelm", stablelm_config, TOP, _BLOCK),
    "olmo": Family("olmo", olmo_config, TOP, _BLOCK, row_orders=_PAIRS),
    "olmo2": replace(
        _OLMO2,
        variants=(
            (
                lambda header: header.get("attention.sliding_window") is not None,
                replace(_OLMO2, model_type="olmo3", config=olmo3_config),
            ),
        ),
    ),
    "granite": replace(_LLAMA, model_type="granite", config=granite_config),
    "granitemoe": Family(
        "granitemoe", granitemoe_config, TOP, _BLOCK | GRANITE_EXPERTS, row_orders=_PAIRS
    ),
    "glm4moe": Family(
        "glm4_moe",
        glm4_moe_config,
        TOP,
        _BLOCK
        | _HEAD_NORMS
        | EXPERTS
        | SHARED_EXPERTS
        | _PREDICTOR
        | {"post_attention_norm": "post_attention_layernorm"},
        whole_names=frozenset({CORRECTION}),
    ),
    "deepseek2": replace(
        _DEEPSEEK_V2,
        variants=((is_deepseek_v3, replace(_DEEPSEEK_V2, model_type="deepseek_v3")),),
    ),
    "llama4": Family(
        "llama4_text",
        llama4_config,
        TOP,
        _BLOCK
        | {
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
            "ffn_up_exps": "feed_forward.experts.{}.up_proj",
            "ffn_down_exps": "feed_forward.experts.{}.down_proj",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        ernie_moe_config,
        TOP,
        _BLOCK | EXPERTS | SHARED_EXPERTS | {CORRECTION: "mlp.moe_statics.e_score_correction_bias"},
        whole_names=frozenset({CORRECTION}),
    ),
    "smollm3": replace(_LLAMA, model_type="smollm3", config=smollm3_config),
    "command-r": Family("cohere", cohere_config, TOP, _BLOCK | _HEAD_NORMS),
    "cohere2": Family("cohere2", cohere2_config, TOP, _BLOCK),
    "exaone4": Family("exaone4", exaone4_config, TOP, _BLOCK | _HEAD_NORMS | _NORMS_AFTER),
    "mistral3": replace(_LLAMA, model_type="ministral3", config=ministral3_config),
    "seed_oss": Family(
        "seed_oss",
        seed_oss_config,
        TOP,
        _BLOCK | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "nemotron": Family("nemotron", nemotron_config, TOP, _BLOCK, norm_offset=1.0),
}
