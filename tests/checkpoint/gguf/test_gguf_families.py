"""GGUF files of llama.cpp's converter give the tensors and the logits of the safetensors that they
were made of.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest

from octavo.checkpoint.gguf.gguf_families import FAMILIES
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import build_programs
from tests.checkpoint.gguf.test_gguf_encoders import CASES as ENCODER_CASES
from tests.support.chatglm import save_as_chatglm
from tests.support.gguf_conversion import convert
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import tiny_model


class Case(NamedTuple):
    """A tiny model, in widths that a header can state, and what the converter reads besides."""

    family: str
    architecture: str
    shape: dict[str, Any] = {}  # noqa: RUF012
    written: dict[str, Any] = {}  # noqa: RUF012


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MPT = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None},
}
PHIMOE = {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 512}
LONG_CONTEXT = {"original_max_position_embeddings": 2048}
JITTER = {"router_jitter_noise": 0.01}
LONGROPE_MOE = LONGROPE | {"short_mscale": 1.1055415967851332, "long_mscale": 1.1055415967851332}
LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "max_position_embeddings": 20_000}
SOFTMAX = {"scoring_func": "softmax"}
GROUPS = {"n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"}
GEMMA3 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
NO_PREDICTOR = {"num_nextn_predict_layers": 0}
FALCON_H1 = {
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
"""Factors that the converter would multiply the weights with."""
HYBRID = {"layer_types": ["mamba", "attention", "mamba"]}
"""Types of layers in the words of transformers 4, which the converter reads."""
NEMOTRON_H = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
NEMOTRON_H_WRITTEN = {
    "num_hidden_layers": 4,
    "mamba_d_head": 12,
    "hybrid_override_pattern": "ME*E",
}
NEMOTRON_H_DENSE = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
NEMOTRON_H_DENSE_WRITTEN = {
    **NEMOTRON_H_WRITTEN,
    "hybrid_override_pattern": "M-*-",
    "without": ("num_experts_per_tok", "n_routed_experts"),
}
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
}
GEMMA4_LARGE = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 5.0,
}
HUNYUAN_MOE = {
    "moe_intermediate_size": [38, 38],
    "moe_topk": [2, 2],
    "num_shared_expert": [1, 1],
}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 256}

CASES = (
    Case("llama", "llama"),
    Case("llama", "llama", {"rope_parameters": LLAMA3, "num_attention_heads": 2}),
    Case("mistral", "llama", {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 90}),
    Case("qwen2", "qwen2"),
    Case("qwen3", "qwen3"),
    Case("mixtral", "llama", {"hidden_size": 64, "sliding_window": None}),
    Case("qwen2_moe", "qwen2moe", {"mlp_only_layers": [], "norm_topk_prob": False}),
    Case("qwen3_moe", "qwen3moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    Case("olmoe", "olmoe", {"norm_topk_prob": False}),
    Case("gemma", "gemma"),
    Case("gemma2", "gemma2", {"query_pre_attn_scalar": 24}),
    Case("gemma3_text", "gemma3", GEMMA3),
    Case("gemma3n_text", "gemma3n", {"vocab_size": 320}),
    Case("gemma4_text", "gemma4", {}, GEMMA4),
    Case("gemma4_text", "gemma4", GEMMA4_LARGE, GEMMA4),
    Case("phi", "phi2", {"intermediate_size": 256, "num_key_value_heads": 4}),
    Case("phi3", "phi3"),
    Case("phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512}),
    Case("phi3", "phi3", {"sliding_window": 24}),
    Case("phimoe", "phimoe", JITTER, PHIMOE | LONG_CONTEXT),
    Case("phimoe", "phimoe", JITTER | {"rope_parameters": LONGROPE_MOE}, PHIMOE),
    Case("glm", "chatglm", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    Case("chatglm", "chatglm", {"head_dim": 16}, {"head_dim": 16}),
    Case("glm4", "glm4", {"head_dim": 16}),
    Case("gpt2", "gpt2", {"n_inner": 288}, {"n_ctx": 1024}),
    Case("gpt_bigcode", "starcoder", {"n_inner": 240}),
    Case("starcoder2", "starcoder2", {"sliding_window": None}),
    Case("gpt_neox", "gptneox", {}, {"rotary_pct": 0.25}),
    Case("gpt_neox", "gptneox", {"use_parallel_residual": False}, {"rotary_pct": 0.25}),
    Case("bloom", "bloom"),
    Case("mpt", "mpt", {}, MPT),
    Case("falcon", "falcon", {"ffn_hidden_size": 256}, {"num_kv_heads": 1}),
    Case("falcon", "falcon", FALCON_40B),
    Case("falcon", "falcon", FALCON_40B | {"num_ln_in_parallel_attn": 1}),
    Case("stablelm", "stablelm", {"use_qkv_bias": True}),
    Case("stablelm", "stablelm", {"use_parallel_residual": True}),
    Case("olmo", "olmo"),
    Case("olmo", "olmo", {"clip_qkv": 0.8}),
    Case("olmo2", "olmo2"),
    Case("olmo3", "olmo2"),
    Case("granite", "granite"),
    Case("granitemoe", "granitemoe"),
    Case("glm4_moe", "glm4moe", ONE_GROUP, NO_PREDICTOR),
    Case("glm4_moe", "glm4moe", ONE_GROUP | {"use_qk_norm": False}, NO_PREDICTOR),
    Case("mamba", "mamba"),
    Case("mamba2", "mamba2", {"time_step_limit": [0.0, float("inf")]}),
    Case("jamba", "jamba"),
    Case("jamba", "jamba", {"num_experts": 1}),
    Case("granitemoehybrid", "granitehybrid", {}, HYBRID),
    Case("granitemoehybrid", "granitehybrid", {"num_local_experts": 0}, HYBRID),
    Case("bamba", "granitehybrid", {}, {"attn_rotary_emb": 6}),
    Case("falcon_h1", "falcon-h1", {"head_dim": 12, **FALCON_H1}, {"head_dim": 12}),
    Case("nemotron_h", "nemotron_h_moe", NEMOTRON_H, NEMOTRON_H_WRITTEN),
    Case("nemotron_h", "nemotron_h", NEMOTRON_H_DENSE, NEMOTRON_H_DENSE_WRITTEN),
    Case("lfm2", "lfm2", {}, {"block_ffn_dim_multiplier": 1.0}),
    Case("lfm2_moe", "lfm2moe", {"routed_scaling_factor": 1.0}),
    Case("minimax_m2", "minimax-m2", {}, {"rotary_dim": 8}),
    Case("hunyuan_v1_dense", "hunyuan-dense"),
    Case("hunyuan_v1_moe", "hunyuan-moe", {}, HUNYUAN_MOE),
    Case("ernie4_5", "ernie4_5"),
    Case("glm4_moe_lite", "deepseek2", {}, {"scoring_func": "sigmoid", "first_k_dense_replace": 1}),
    Case("gpt_oss", "gpt-oss"),
    Case("ernie4_5_moe", "ernie4_5-moe", {}, {"moe_layer_interval": 1}),
    Case("deepseek_v2", "deepseek2", {}, SOFTMAX),
    Case("deepseek_v2", "deepseek2", {"q_lora_rank": 20, "rope_parameters": YARN}, SOFTMAX),
    Case("deepseek_v2", "deepseek2", GROUPS, SOFTMAX),
    Case("deepseek_v3", "deepseek2", {"rope_parameters": YARN}, {"scoring_func": "sigmoid"}),
    Case("llama4_text", "llama4", LLAMA4),
    Case("llama4_text", "llama4", LLAMA4 | {"interleave_moe_layer_step": 1}),
    Case("qwen3_next", "qwen3next", {"mlp_only_layers": []}),
    Case("qwen3_5_text", "qwen35"),
    Case("qwen3_5_moe_text", "qwen35moe", {"hidden_size": 64}),
    Case("smollm3", "smollm3"),
    Case("cohere", "command-r"),
    Case("cohere", "command-r", {"use_qk_norm": True}),
    Case("cohere2", "cohere2", {}, {"rotary_pct": 1.0}),
    Case("internlm3", "llama"),
    Case("exaone4", "exaone4"),
    Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Case("ministral3", "mistral3", {"rope_parameters": YARN}),
    Case("seed_oss", "seed_oss"),
    Case("nemotron", "nemotron"),
)


SPLIT_OTHERWISE = {
    "qwen3next": ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight"),
}
"""Matrices that the file has in other parts than safetensors, by their last names: the logits hold
them."""


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case.family, *case.shape]), scope="module")
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, Path]:
    case, folder = request.param, tmp_path_factory.mktemp("gguf")
    source = source_of(case, folder)
    return case, source, convert(source, folder, **case.written)


def source_of(case: Case, folder: Path) -> Path:
    """Returns the Hugging Face directory of a case; transformers has no ChatGLM of its own."""
    if case.family != "chatglm":
        return tiny_model(case.family, **case.shape).path
    save_as_chatglm(tiny_model("glm", **case.shape), folder / "chatglm")
    return folder / "chatglm"


def test_tensors_are_bitwise_the_models(converted: tuple[Case, Path, Path]) -> None:
    """Names, shapes and row orders are those of safetensors; weights of norms that the file keeps
    plus one, and rates that it keeps as their exponentials, lose an ulp of 1 at most.
    """
    case, source, path = converted
    found, given = open_checkpoint(path), open_checkpoint(source)
    architecture = found.architecture
    assert architecture == case.architecture
    reader, wanted = WeightReader(found), WeightReader(given)
    ours, theirs = (
        [
            weight
            for weight in build_programs(each.config)["decoder"].weights
            if not weight.name.endswith(SPLIT_OTHERWISE.get(architecture, "-"))
        ]
        for each in (found, given)
    )
    for weight, other in zip(ours, theirs, strict=True):
        plus_one = FAMILIES[architecture].norm_offset and weight.name.endswith("norm.weight")
        is_rounded = plus_one or weight.name.endswith("A_log")
        np.testing.assert_allclose(
            reader.load(weight).dequantize(),
            wanted.load(other).dequantize(),
            atol=2.4e-7 if is_rounded else 0,
            rtol=0,
            err_msg=weight.name,
        )


def test_logits_are_the_models(converted: tuple[Case, Path, Path]) -> None:
    """A header and what llama.cpp knows without it build the Program of the config.json."""
    _, source, path = converted
    ids = np.random.default_rng(0).integers(0, 240, 40)
    wanted = PagedRunner(source).logits(ids)
    np.testing.assert_allclose(
        PagedRunner(path).logits(ids), wanted, atol=2e-6 * abs(wanted).max(), rtol=0
    )


def test_every_architecture_has_a_case() -> None:
    """No row of the table stays unproven."""
    with_towers = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # test_mmproj.py
    tested = {case.architecture for case in (*CASES, *ENCODER_CASES)} | {"t5"} | with_towers
    assert tested == set(FAMILIES)


@pytest.mark.parametrize("norm", [{}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}])
def test_factors_that_the_converter_folds_into_weights(
    norm: dict[str, Any], tmp_path: Path
) -> None:
    """Falcon-H1's header has no factors; the weights of the file have them already."""
    source = tiny_model("falcon_h1", head_dim=12, **norm).path
    ids = np.random.default_rng(0).integers(0, 240, 40)
    wanted = PagedRunner(source).logits(ids)
    found = PagedRunner(convert(source, tmp_path, head_dim=12)).logits(ids)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * abs(wanted).max(), rtol=0)


WIDE = {
    "qwen3_5_text": {"hidden_size": 64, "linear_value_head_dim": 16, "intermediate_size": 96},
    "qwen3_next": {
        "mlp_only_layers": [],
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": WIDTHS_OF_32["deepseek_v3"] | {"qk_nope_head_dim": 32},
}
"""Families whose files are put together or turned, in widths of which 32 is a factor."""


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("family", WIDE)
def test_files_of_8_bits_are_nearly_the_model(family: str, backend: str, tmp_path: Path) -> None:
    """Rows and inputs of blocks have their own order, too."""
    source = tiny_model(family, **WIDE[family]).path
    written = {"scoring_func": "sigmoid"} if family == "deepseek_v3" else {}
    path = convert(source, tmp_path, kind=gguf.LlamaFileType.MOSTLY_Q8_0, **written)
    kinds = Counter(entry.kind.name for entry in open_checkpoint(path).file.tensors.values())
    assert kinds["Q8_0"] > 10
    ids = np.random.default_rng(0).integers(0, 240, 40)
    wanted = PagedRunner(source).logits(ids)
    found = PagedRunner(path, backend_named(backend)).logits(ids)
    off = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert np.median(off) < 0.15
