"""Configs of multimodal models that nest the text model's keys in a table.

Adds defaults that some files omit. Source: the configuration classes of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GEMMA4 = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
QWEN3_5 = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "image_token_id": 248_056,
}
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    "gemma4": GEMMA4,
    "gemma4_unified": GEMMA4
    | {
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "voxtral": {
        "vocab_size": 131_072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000_000.0,
        "head_dim": 128,
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
}
"""Values of keys that `text_config` may omit, by model type."""


TEXT_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma": {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
}
"""Values of keys that `text_config` may omit, by its own model type."""


TOWER_CONFIGS = ("vision_config", "audio_config")
"""Keys of the configs of towers."""

NOT_OF_TEXT = {"paligemma": ("hidden_size", "vocab_size")}
"""Top-level keys that do not describe the text model, by model type."""


def with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a multimodal config with the keys of `text_config` merged in; top-level keys take
    precedence. `text_model_type` is its model_type. Other configs are unchanged.
    """
    text = config.get("text_config")
    left_out = LEFT_OUT.get(str(config.get("model_type")))
    has_tower = any(isinstance(config.get(name), dict) for name in TOWER_CONFIGS)
    if not isinstance(text, dict) or not (left_out or has_tower):
        return config
    own = {name: value for name, value in config.items() if value is not None}
    own.pop("text_config")
    if text.get("tie_word_embeddings") is True:  # unless the files have an output layer
        own.pop("tie_word_embeddings", None)
    for name in NOT_OF_TEXT.get(str(config.get("model_type")), ()):
        own.pop(name, None)
    if text.get("model_type") is not None:
        own = {"text_model_type": text["model_type"], **own}
    text_left_out = TEXT_LEFT_OUT.get(str(text.get("model_type")), {})
    return {**text_left_out, **(left_out or {}), **text, **own}
