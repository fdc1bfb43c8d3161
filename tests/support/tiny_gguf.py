"""Tiny GGUF files of a transformers model, written by gguf-py as llama.cpp's converter writes
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}


def tiny_model(architecture: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if architecture == "llama":
        return LlamaForCausalLM(
            LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=False)
        )
    if architecture == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32))
    if architecture == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=32, sliding_window=16))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(-0.4, 0.4)
        return model
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    )


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Converts rows in halves to rows in rotary pairs, as the converter does for llama."""
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def _hyperparameters(writer: gguf.GGUFWriter, architecture: str, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_key_length(
        config.head_dim
        if hasattr(config, "head_dim")
        else config.hidden_size // config.num_attention_heads
    )
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)


SPECIAL = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3}
"""First tokens of a tiny vocabulary, and their types."""


def write_tiny_gguf(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    kind: str = "F32",
    tokens: int = 0,
    extra: dict[str, object] | None = None,
    max_tensors: int = 0,
    special: Mapping[str, int] = SPECIAL,
    merges: Sequence[str] = ("a b",),
) -> Path:
    """Writes the model's tensors in `kind`, 1-D ones in F32; `tokens` > 0 adds a vocabulary of that
    size that begins with the tokens of `special`, texts with their types; `max_tensors` > 0 makes
    several files.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    _hyperparameters(writer, architecture, model.config)
    for key, value in (extra or {}).items():
        add = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        num_plain = tokens - len(special)
        writer.add_token_list([*special, *(f"t{i}" for i in range(num_plain))])
        writer.add_token_types([*special.values(), *[1] * num_plain])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], model.config.num_hidden_layers)
    number = gguf.GGMLQuantizationType[kind]
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            array = interleave(
                array,
                (
                    model.config.num_attention_heads
                    if "q_proj" in key
                    else model.config.num_key_value_heads
                ),
            )
        if architecture == "gemma3" and "norm" in key:
            array = array + 1
        if architecture == "gpt2" and any(
            part in key for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        ):
            array = np.ascontiguousarray(array.T)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
