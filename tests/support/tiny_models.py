"""Tiny seeded models of every family, built with transformers and saved as Hugging Face
directories, once a test session.

`tiny_model("llama")` gives its config.json, the directory and the torch model in float32. Weights
are drawn wide enough that logits differ clearly. `in_float64` gives the same model computing in
float64 throughout, as an oracle.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "qwen2": {
        "vocab_size": 257,
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    },
    "qwen3": {
        "vocab_size": 300,
        "hidden_size": 80,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "gemma3_text": {
        "vocab_size": 384,
        "hidden_size": 96,
        "intermediate_size": 130,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "gpt2": {
        "vocab_size": 301,
        "n_embd": 72,
        "n_layer": 2,
        "n_head": 3,
        "n_inner": 150,
        "n_positions": 1024,
    },
    "qwen2_moe": {
        "vocab_size": 264,
        "hidden_size": 56,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "gpt_oss": {
        "vocab_size": 288,
        "hidden_size": 60,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
    },
    "deepseek_v3": {
        "vocab_size": 270,
        "hidden_size": 52,
        "intermediate_size": 66,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "gemma": {
        "vocab_size": 270,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "gemma2": {
        "vocab_size": 280,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "phi": {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "phi3": {
        "vocab_size": 262,
        "hidden_size": 64,
        "intermediate_size": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "glm": {
        "vocab_size": 266,
        "hidden_size": 64,
        "intermediate_size": 92,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "glm4": {
        "vocab_size": 268,
        "hidden_size": 64,
        "intermediate_size": 92,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "opt": {
        "vocab_size": 258,
        "hidden_size": 60,
        "ffn_dim": 130,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    },
    "gpt_neox": {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 120,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "gptj": {
        "vocab_size": 274,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 110,
        "rotary_dim": 8,
    },
    "gpt_bigcode": {"vocab_size": 276, "n_embd": 60, "n_layer": 2, "n_head": 3, "n_inner": 140},
    "bloom": {"vocab_size": 278, "hidden_size": 72, "n_layer": 2, "n_head": 6},
    "mpt": {"vocab_size": 282, "d_model": 72, "n_layers": 2, "n_heads": 6},
    "falcon": {
        "vocab_size": 284,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_hidden_size": 150,
    },
    "stablelm": {
        "vocab_size": 286,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "starcoder2": {
        "vocab_size": 290,
        "hidden_size": 64,
        "intermediate_size": 94,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "olmo": {
        "vocab_size": 292,
        "hidden_size": 64,
        "intermediate_size": 86,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "olmo2": {
        "vocab_size": 294,
        "hidden_size": 64,
        "intermediate_size": 86,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "olmo3": {
        "vocab_size": 296,
        "hidden_size": 64,
        "intermediate_size": 86,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "granite": {
        "vocab_size": 298,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "smollm3": {
        "vocab_size": 302,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "cohere": {
        "vocab_size": 304,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "cohere2": {
        "vocab_size": 306,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "internlm3": {
        "vocab_size": 308,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "exaone4": {
        "vocab_size": 310,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "ministral3": {
        "vocab_size": 312,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "seed_oss": {
        "vocab_size": 314,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "nemotron": {
        "vocab_size": 316,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "t5": {
        "vocab_size": 250,
        "d_model": 48,
        "d_kv": 10,
        "d_ff": 70,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
    },
}
"""Sizes of each family's tiny model; widths are no multiples of 32 on purpose."""

DETAILS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "qwen2": {
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048},
    "gemma3_text": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
    "gpt2": {},
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "shared_expert_intermediate_size": 50,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "sliding_window": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 30,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 14,
        "v_head_dim": 18,
    },
    "gemma": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 24},
    "gemma2": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "head_dim": 24,
        "sliding_window": 24,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "phi": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "phi3": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 2048,
    },
    "glm": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 20},
    "glm4": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 20},
    "opt": {"max_position_embeddings": 2048},
    "gpt_neox": {"max_position_embeddings": 2048},
    "gptj": {},
    "gpt_bigcode": {},
    "bloom": {},
    "mpt": {},
    "falcon": {"max_position_embeddings": 2048},
    "stablelm": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "starcoder2": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "sliding_window": 24},
    "olmo": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "olmo2": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "olmo3": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "sliding_window": 24},
    "granite": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "smollm3": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "cohere": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "logit_scale": 0.5},
    "cohere2": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "sliding_window": 24,
        "logit_scale": 0.5,
    },
    "internlm3": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "exaone4": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "sliding_window": 24},
    "ministral3": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 16},
    "seed_oss": {"num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "max_position_embeddings": 2048},
    "t5": {},
}

WIDTHS_OF_32: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 96},
    "qwen2": {"hidden_size": 96, "intermediate_size": 96},
    "qwen3": {"hidden_size": 96, "intermediate_size": 96},
    "gemma3_text": {"intermediate_size": 128},
    "gpt2": {"n_embd": 96, "n_inner": 160},
    "qwen2_moe": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "deepseek_v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "v_head_dim": 24,
    },
}
"""Overrides with which everything that int4 packs has rows of a multiple of 32."""

FAMILIES = tuple(SHAPES)

DISTINCT = (
    *("llama", "qwen2", "gemma3_text", "gpt2", "qwen2_moe", "gpt_oss", "deepseek_v3", "t5"),
    *("bloom", "gptj", "olmo2"),
)
"""Families that between them have every op, cache group and way of storing weights."""


def each_family(*, without: tuple[str, ...] = ()) -> list[Any]:
    """Returns all families for `pytest.mark.parametrize`; those that add nothing are slow tests."""
    return [
        family if family in DISTINCT else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
        if family not in without
    ]


NATIVE_FAMILIES = tuple(
    family for family in FAMILIES if family not in ("qwen2_moe", "gpt_oss", "deepseek_v3", "t5")
)
"""Families that the native backend runs."""


class TinyModel(NamedTuple):
    """A tiny model: its config.json, the directory with it and model.safetensors, and the torch
    model in float32, eval mode.
    """

    config: dict[str, Any]
    path: Path
    model: Any


def tiny_model(model_type: str, *, seed: int = 0, **overrides: Any) -> TinyModel:
    """Returns a seeded model of the family; `overrides` are fields of its transformers config."""
    return _build(model_type, seed, json.dumps(overrides, sort_keys=True))


@cache
def _build(model_type: str, seed: int, overrides: str) -> TinyModel:
    options = (
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | SHAPES.get(model_type, {})
        | DETAILS.get(model_type, {})
        | json.loads(overrides)
    )
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = _model_class(config)._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    _draw_weights(model, seed)
    path = (
        Path(_session_directory().name)
        / f"{model_type}-{len(list(Path(_session_directory().name).iterdir()))}"
    )
    with _quiet():
        model.save_pretrained(path)
    return TinyModel(json.loads((path / "config.json").read_text()), path, model.eval())


def in_float64(model: Any, *, attention: str = "eager") -> Any:
    """Returns the same model in float64 with an implementation of attention that transformers has.
    Run it inside `double_precision()`, for transformers casts to float32 here and there.
    """
    with double_precision():
        twin = (
            type(model)
            ._from_config(
                model.config, attn_implementation=attention, experts_implementation="eager"
            )
            .double()
            .eval()
        )
        twin.load_state_dict(model.state_dict())
    return twin


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Gives float64 to code that asks PyTorch for float32 by name (norms, softmax, rope tables, and
    ALiBi in bfloat16).
    """
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double),
        torch.no_grad(),
    ):
        yield


def _model_class(config: Any) -> Any:
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    return auto._model_mapping[type(config)]


def _draw_weights(model: Any, seed: int) -> None:
    """Draws matrices at 1.2 / sqrt(inputs), norms near their neutral value, and biases that are not
    zero.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if (
                ("embed" in name and "norm" not in name)
                or "shared" in name
                or "wte" in name
                or "wpe" in name
            ):
                tensor.copy_(0.5 * noise)
            elif "norm" in name or "ln_" in name:
                tensor.add_(0.2 * noise)
            elif tensor.ndim == 1 or name.endswith("_bias"):
                tensor.copy_(0.3 * noise)
            elif "relative_attention_bias" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(1.2 * noise / min(tensor.shape[-2:]) ** 0.5)
    model.tie_weights()


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    """Makes a directory that is removed when Python ends."""
    return tempfile.TemporaryDirectory(prefix="octavo-tiny-")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
