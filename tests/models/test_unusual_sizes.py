"""Checkpoints of unusual sizes: heads wider or narrower than their share, odd vocabularies, outputs
of their own or tied, biases everywhere, in each precision that files have.

Logits are compared with transformers in float64: for files in fp32 within 1e-9 of the largest on
the reference and 3e-5 on torch; for files in bf16 and fp16, on torch, whose Values are rounded,
within 6% and 1% in the mean. Greedy tokens on torch are transformers' own.
"""

from functools import cache

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.test_families import TOLERANCE, YARN
from tests.models.test_t5 import logits as t5_logits
from tests.models.test_t5 import oracle as t5_oracle
from tests.support.backend_choice import chosen_backend
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import double_precision, in_float64, tiny_model

torch.set_num_threads(1)

HALF = {"bfloat16": 0.06, "float16": 0.01}
NUM_TOKENS = 40
CASES = {
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "vocab_size": 253,
        },
    ),
    "llama-narrow-heads": (
        "llama",
        {
            "vocab_size": 241,
            "hidden_size": 55,
            "head_dim": 6,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        },
    ),
    "llama-wide-heads": (
        "llama",
        {
            "head_dim": 38,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN,
            "hidden_size": 36,
        },
    ),
    "mistral": (
        "mistral",
        {
            "vocab_size": 211,
            "hidden_size": 45,
            "intermediate_size": 31,
            "num_hidden_layers": 2,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "head_dim": 10,
            "sliding_window": 9,
        },
    ),
    "qwen2": (
        "qwen2",
        {
            "vocab_size": 251,
            "hidden_size": 66,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "vocab_size": 243,
            "hidden_size": 41,
            "head_dim": 22,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "vocab_size": 247,
            "hidden_size": 54,
            "head_dim": 18,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "sliding_window": 7,
            "attention_bias": True,
            "query_pre_attn_scalar": 11,
        },
    ),
    "gpt2": (
        "gpt2",
        {"vocab_size": 239, "n_embd": 35, "n_head": 5, "n_inner": 47, "tie_word_embeddings": False},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "vocab_size": 245,
            "hidden_size": 42,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 13,
            "shared_expert_intermediate_size": 29,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "vocab_size": 249,
            "hidden_size": 37,
            "head_dim": 22,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "intermediate_size": 23,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "vocab_size": 255,
            "hidden_size": 43,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 19,
            "q_lora_rank": 17,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 11,
            "v_head_dim": 9,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 15,
        },
    ),
}
T5 = {
    "narrow heads": {"vocab_size": 251, "d_model": 30, "d_kv": 7, "num_heads": 5, "d_ff": 41},
    "wide heads, gated": {
        "feed_forward_proj": "gated-gelu",
        "d_model": 36,
        "d_kv": 22,
        "num_heads": 2,
    },
    "few buckets": {
        "relative_attention_num_buckets": 6,
        "relative_attention_max_distance": 11,
        "num_decoder_layers": 1,
    },
}


@cache
def oracle(case):
    """Returns the model, token ids and transformers' logits for them."""
    family, overrides = CASES[case]
    tiny = tiny_model(family, **overrides)
    ids = np.random.default_rng(2).integers(3, tiny.config["vocab_size"], NUM_TOKENS)
    with double_precision():
        wanted = in_float64(tiny.model)(torch.tensor(ids)[None]).logits[0].numpy()
    return tiny, ids, wanted


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, backend):
    tiny, ids, wanted = oracle(case)
    found = PagedRunner(tiny.path, backend_named(backend), num_blocks=8).logits(ids, 17)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[backend] * abs(wanted).max())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_files_in_half_precision(case, dtype, tmp_path):
    """Files in half precision differ from the oracle by the rounding of Values alone; the weights
    are the file's.
    """
    tiny, ids, _ = oracle(case)
    half = type(tiny.model).from_pretrained(
        tiny.path, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    half.save_pretrained(tmp_path)
    with double_precision():
        wanted = in_float64(half.float())(torch.tensor(ids)[None]).logits[0].numpy()
    runner = PagedRunner(tmp_path, backend_named("torch"), num_blocks=8)
    assert runner.layouts[0].dtype == {"float16": "fp16", "bfloat16": "bf16"}[dtype], (
        "computed in the file's precision"
    )
    found = runner.logits(ids, 17)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < HALF[dtype] * abs(wanted).max()


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_transformers_own(case):
    tiny, ids, _ = oracle(case)
    prompts = [ids[:1].tolist(), ids[:19].tolist(), ids.tolist()]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    options = {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": "8MiB",
        "threads": 1,
        "report": lambda text: None,
    }
    with LLM(str(tiny.path), backend=chosen_backend("torch"), **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert list(map(list, found)) == [greedy(tiny.model, prompt, 9) for prompt in prompts]


@torch.no_grad()
def greedy(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("case", T5)
def test_t5(case):
    tiny = tiny_model("t5", **T5[case])
    wanted = t5_oracle(in_float64(tiny.model))
    for chunk in (40, 7):
        found = t5_logits(PagedRunner(tiny.path, backend_named("torch"), padding=2), chunk)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())
