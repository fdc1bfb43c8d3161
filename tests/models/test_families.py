"""Every family's Programs, on the backends that run them all, give transformers' logits.

The oracle computes in float64 throughout (`tiny_models.double_precision`). Tolerance 1e-9 of the
largest logit on the reference, 3e-5 on torch and native in fp32.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import (
    FAMILIES,
    NATIVE_FAMILIES,
    double_precision,
    in_float64,
    tiny_model,
)
from tests.support.tiny_other_shapes import TEXT_ONLY

torch.set_num_threads(1)

TOLERANCE = {"reference": 1e-9, "torch": 3e-5, "native": 3e-5}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 8.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
CASES = {
    **{family: (family, {}) for family in FAMILIES},
    **{family: (family, options) for family, options in TEXT_ONLY.items()},
    "llama-bias-tied": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        },
    ),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}},
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 20.0, "truncate": False}},
    ),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "llama-old-keys": (
        "llama",
        {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "mistral-window": (
        "mistral",
        {
            "vocab_size": 200,
            "hidden_size": 64,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 20,
        },
    ),
    "qwen2-upper-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3-softcap": (
        "gemma3_text",
        {"final_logit_softcapping": 3.0, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3-rope-scaling": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 36,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
        },
    ),
    "gpt2-scales": (
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    "qwen2_moe-variants": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "qkv_bias": False,
        },
    ),
    "mixtral-no-window": ("mixtral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen3_moe-variants": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "olmoe-normed-bias": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 40, "do_layer_norm_before": False}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 40}),
    "gemma-plain-names": ("gemma", {"hidden_act": "gelu", "tie_word_embeddings": False}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "phi-longer-turn": ("phi", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi3-window": ("phi3", {"sliding_window": 20}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": FACTORS,
                "long_factor": [2 * factor for factor in FACTORS],
            },
        },
    ),
    "llama4-chunks": ("llama4_text", {"attention_chunk_size": 24, "floor_scale": 30}),
    "llama4-chunks-of-no-layer": (
        "llama4_text",
        {"attention_chunk_size": 24, "layer_types": ["full_attention"] * 4, "floor_scale": 7},
    ),
    "llama4-untuned": (
        "llama4_text",
        {"attention_chunk_size": 50, "attn_temperature_tuning": False, "attn_scale": 0.3},
    ),
    "ministral3-growing": (
        "ministral3",
        {
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        },
    ),
    "llama4-two-experts": (
        "llama4_text",
        {
            "num_experts_per_tok": 2,
            "moe_layers": [0, 1, 3],
            "no_rope_layers": [1, 0, 1, 1],
            "use_qk_norm": False,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe-plain": (
        "phimoe",
        {
            "router_jitter_noise": 0.01,
            "attention_bias": False,
            "lm_head_bias": False,
            "tie_word_embeddings": True,
            "sliding_window": 20,
        },
    ),
    "phimoe-longrope": (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": FACTORS,
                "long_factor": [2 * factor for factor in FACTORS],
                "short_mscale": 1.15,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "phi3-outgrown": (
        "phi3",
        {
            "original_max_position_embeddings": 100,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": FACTORS,
                "long_factor": [2 * factor for factor in FACTORS],
            },
        },
    ),
    "phimoe-outgrown": (
        "phimoe",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": FACTORS,
                "long_factor": [2 * factor for factor in FACTORS],
                "short_mscale": 1.15,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 100,
            },
        },
    ),
    "phi3-part-turned": ("phi3", {"partial_rotary_factor": 0.75}),
    "glm-no-bias": ("glm", {"attention_bias": False}),
    "opt-no-bias": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt_neox-in-turn": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
    ),
    "gpt_bigcode-all-heads": ("gpt_bigcode", {"multi_query": False}),
    "bloom-odd-heads": ("bloom", {"n_head": 3}),
    "mpt-whole-heads": ("mpt", {"n_heads": 8}),
    "falcon-old-7b": ("falcon", {}),
    "falcon-rw": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "phi-head-norms": ("phi", {"qk_layernorm": True}),
    "stablelm-12b": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "cohere-plus": ("cohere", {"use_qk_norm": True}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "sliding_window": None}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "hunyuan-stretched": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
            "attention_bias": True,
        },
    ),
    "lfm2_moe-plain": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True},
    ),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.8}),
    "olmoe-clipped": ("olmoe", {"clip_qkv": 0.8}),
    "mpt-clipped": (
        "mpt",
        {"attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 0.8}},
    ),
    "olmo2-bias": ("olmo2", {"attention_bias": True}),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
    "ernie4_5_moe-biases": ("ernie4_5_moe", {"use_bias": True}),
    "granite-bias": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_bias": True,
        },
    ),
    "lfm2-bias": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "exaone4-no-windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "nemotron-bias": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "deepseek-yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-many-heads": ("deepseek_v3", {"num_attention_heads": 20, "num_key_value_heads": 20}),
    "falcon_h1-norm-last": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 3},
    ),
    "falcon_h1-norm-first": ("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True}),
    "granitemoehybrid-dense-rope": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "mamba-bias": ("mamba", {"use_bias": True, "use_conv_bias": False}),
    "deepseek-plain": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
}


SDPA = {"falcon-rw"}
"""Cases whose oracle is not eager attention, which adds Falcon's ALiBi twice in transformers 5.23
(once scaled, in the mask); PyTorch's own attention adds it once, as the model's own code does.
"""


@cache
def oracle(case):
    """Returns the model, token ids, and transformers' logits for them."""
    family, overrides = CASES[case]
    tiny = tiny_model(family, **overrides)
    ids = np.random.default_rng(1).integers(
        0, tiny.config.get("text_config", tiny.config)["vocab_size"], 270
    )
    with double_precision():
        model = in_float64(tiny.model, attention="sdpa" if case in SDPA else "eager")
        if case == "phimoe-outgrown":
            _take_long_factors(model.model.rotary_emb, len(ids))
        wanted = model(torch.tensor(ids)[None]).logits[0].numpy()
    assert wanted.dtype == np.float64
    assert wanted.std() > 0.3, "logits that hardly differ prove nothing"
    return tiny.path, ids, wanted


def _take_long_factors(rotary: Any, num_tokens: int) -> None:
    """Has Phi-3.5-MoE's angles follow the length, as in transformers 4 and the model's own code:
    transformers 5.23 switches the factor on cosines and sines, and keeps the short list.
    """
    rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=num_tokens)


RUNS = [
    (case, backend)
    for case, (family, _) in CASES.items()
    for backend in TOLERANCE
    if backend != "native" or (family in (*NATIVE_FAMILIES, *TEXT_ONLY, "mistral"))
]


GROWING = ("llama4-chunks", "llama4-chunks-of-no-layer", "ministral3-growing")
"""Cases whose queries have factors in fp32, which transformers rounds likewise but for here."""


@pytest.mark.parametrize(("case", "backend"), RUNS)
def test_logits_equal_transformers(case, backend):
    path, ids, wanted = oracle(case)
    found = PagedRunner(path, backend_named(backend)).logits(ids)
    share = max(TOLERANCE[backend], 3e-8 if case in GROWING else 0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * abs(wanted).max())
