"""GGUF headers of each model family in Hugging Face's words: config keys, tensor names, row orders.

One `Family` a GGUF architecture. Knows nothing of bytes (`gguf.py`) and reads no tensor. Source:
llama.cpp's `gguf-py/gguf/constants.py` and `tensor_mapping.py` (keys, names) and its converter (row
orders, norms plus one).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.checkpoint.gguf import GgufFile
from octavo.errors import UnsupportedModel, WeightMismatch

GEMMA3_LOCAL_ROPE_THETA = 10000.0
GEMMA3_PATTERN = 6
GEMMA3_27B_LAYERS = 62
"""Number of layers of the one Gemma 3 whose queries are scaled by hidden_size / heads instead of
head_dim; headers do not say so.
"""


class Header:
    """A header's keys under the architecture's prefix, with errors that name the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Any = None) -> Any:
        """Returns a number; one per layer is fine where all are equal."""
        value = self.get(key, default)
        name = f"{self.architecture}.{key}"
        if value is None:
            raise WeightMismatch(f"{self.file.path}: the header lacks {name}")
        if isinstance(value, np.ndarray):
            different = np.unique(value)
            if len(different) != 1:
                raise UnsupportedModel(
                    f"{self.file.path}: {name} differs from layer to layer, which is not supported"
                )
            value = different[0].item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightMismatch(f"{self.file.path}: {name} is {value!r}, allowed is a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise WeightMismatch(
                f"{self.file.path}: {self.architecture}.{key} is {value!r}, allowed is a whole"
                " number of at least 1"
            )
        return value

    def num_blocks(self) -> int:
        """Number of layers, by the tensors of the file."""
        stated = self.count("block_count")
        found = len({name.split(".")[1] for name in self.file.tensors if name.startswith("blk.")})
        if stated != found:
            raise WeightMismatch(
                f"{self.file.path}: {self.architecture}.block_count is {stated}, the file has"
                f" tensors of {found} blocks"
            )
        return stated


@dataclass(frozen=True, slots=True)
class Family:
    """The mapping from one GGUF architecture to a Hugging Face checkpoint.

    `tensors` and `layer_tensors` map the stems of GGUF names ("output_norm", "attn_q" of
    "blk.N.attn_q") to theirs. `interleaved` names layer stems whose rows stand in rotary pairs (2i,
    2i+1) where safetensors have halves (i, i + D/2). `norm_offset` is the number that the converter
    added to every norm's weight.
    """

    model_type: str
    config: Callable[[Header], dict[str, Any]]
    tensors: dict[str, str]
    layer_tensors: dict[str, str]
    layer_prefix: str = "model.layers"
    interleaved: frozenset[str] = field(default_factory=frozenset)
    norm_offset: float = 0.0

    def name(self, gguf_name: str) -> str | None:
        """Returns the safetensors name, or None where the family has no such tensor."""
        stem, _, suffix = gguf_name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer:
            known = self.layer_tensors.get(layer[2])
            return known and f"{self.layer_prefix}.{layer[1]}.{known}.{suffix}"
        known = self.tensors.get(stem)
        return known and f"{known}.{suffix}"


def _common_config(header: Header) -> dict[str, Any]:
    """Returns the config of a family with RMS norms, rotary positions and grouped heads."""
    heads = header.count("attention.head_count")
    hidden = header.count("embedding_length")
    head_dim = header.count("attention.key_length", hidden // heads)
    config = {
        "hidden_size": hidden,
        "intermediate_size": header.count("feed_forward_length"),
        "num_hidden_layers": header.num_blocks(),
        "num_attention_heads": heads,
        "num_key_value_heads": header.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(header.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(header),
        "max_position_embeddings": header.count("context_length"),
        "hidden_act": "silu",
    }
    rotary_dim = header.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if header.number("expert_count", 0):
        raise UnsupportedModel(
            f"{header.file.path}: {header.architecture} with experts is not supported from GGUF"
        )
    return config


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    """Returns `rope_scaling`.

    Llama 3's frequency factors (a tensor in GGUF) become a longrope of one length, which is the
    same formula.
    """
    if "rope_freqs.weight" in header.file.tensors:
        factors = header.file.tensor("rope_freqs.weight").dequantize().tolist()
        length = header.count("context_length")
        both = {"short_factor": factors, "long_factor": factors}
        return {
            "rope_type": "longrope",
            **both,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": length,
        }
    kind = header.get("rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return None
    if not isinstance(kind, str) or kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{header.file.path}: rope scaling {kind!r}, supported in GGUF are none, linear and"
            " yarn"
        )
    scaling = {"rope_type": kind, "factor": float(header.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.count(
            "rope.scaling.original_context_length"
        )
    return scaling


def _llama_config(header: Header) -> dict[str, Any]:
    tensors = header.file.tensors
    return _common_config(header) | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _qwen2_config(header: Header) -> dict[str, Any]:
    return _common_config(header) | {"use_sliding_window": False}


def _qwen3_config(header: Header) -> dict[str, Any]:
    return _common_config(header) | {
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in header.file.tensors,
    }


def _gemma3_config(header: Header) -> dict[str, Any]:
    config = _common_config(header)
    layers = config["num_hidden_layers"]
    flags = header.get("attention.sliding_window_pattern")
    if isinstance(flags, np.ndarray):
        windowed = [bool(flag) for flag in flags]
    else:
        pattern = header.count("attention.sliding_window_pattern", GEMMA3_PATTERN)
        windowed = [bool((layer + 1) % pattern) for layer in range(layers)]
    scale_width = (
        config["hidden_size"] // config["num_attention_heads"]
        if layers == GEMMA3_27B_LAYERS
        else config["head_dim"]
    )
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in windowed],
        "rope_theta": float(header.number("rope.freq_base", 1000000.0)),
        "rope_local_base_freq": float(header.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA)),
        "query_pre_attn_scalar": scale_width,
        "attention_bias": False,
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _gpt2_config(header: Header) -> dict[str, Any]:
    return {
        "n_embd": header.count("embedding_length"),
        "n_inner": header.count("feed_forward_length"),
        "n_layer": header.num_blocks(),
        "n_head": header.count("attention.head_count"),
        "n_positions": header.count("context_length"),
        "layer_norm_epsilon": header.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
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

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama", _llama_config, _TOP, _BLOCK, interleaved=frozenset({"attn_q", "attn_k"})
    ),
    "qwen2": Family("qwen2", _qwen2_config, _TOP, _BLOCK),
    "qwen3": Family("qwen3", _qwen3_config, _TOP, _BLOCK | _HEAD_NORMS),
    "gemma3": Family(
        "gemma3_text",
        _gemma3_config,
        _TOP,
        _BLOCK
        | _HEAD_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
    "gpt2": Family(
        "gpt2",
        _gpt2_config,
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layer_prefix="transformer.h",
    ),
}
"""All families by `general.architecture`."""
