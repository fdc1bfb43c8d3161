"""Converts GGUF headers of Gemma 4 to Hugging Face configs.

Source: llama.cpp's converter and model implementation.
"""

from __future__ import annotations

import numpy as np

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.gguf.gguf_configs import GEMMA3_PERIOD, by_layer
from octavo.checkpoint.gguf.gguf_family import Config, Header, rms_config, windows_by_pattern


def gemma4_config(header: Header) -> Config:
    num_layers = header.num_blocks()
    windows = windows_by_pattern(header, GEMMA3_PERIOD)
    is_full = [kind == "full_attention" for kind in windows["layer_types"]]
    kv_heads = by_layer(header, "attention.head_count_kv", 0, num_layers)
    own = [layer for layer in range(num_layers) if header.has(f"blk.{layer}.attn_k.weight")]
    sliding, full = (
        next((layer for layer in range(num_layers) if is_full[layer] == each), 0)
        for each in (False, True)
    )
    num_shared = header.number("attention.shared_kv_layers", 0)
    feed_forward = by_layer(header, "feed_forward_length", 0, num_layers)
    width = header.number("embedding_length_per_layer_input", 0)
    table = "per_layer_token_embd.weight"
    return {
        **rms_config(header, kv_heads=int(kv_heads[sliding]), widths=[int(feed_forward[0])]),
        **windows,
        "intermediate_size": int(feed_forward[0]),
        "use_double_wide_mlp": feed_forward[-1] != feed_forward[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": header.count("attention.key_length_swa"),
        "per_layer_config": {
            str(layer): {
                "head_dim": header.count("attention.key_length"),
                "num_key_value_heads": int(kv_heads[full]),
            }
            for layer in range(num_layers)
            if is_full[layer]
        },
        "attention_k_eq_v": any(
            is_full[layer] and not header.has(f"blk.{layer}.attn_v.weight") for layer in own
        ),
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_theta": float(header.number("rope.freq_base_swa", 10000.0))
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": float(header.number("rope.freq_base", 1000000.0)),
                "partial_rotary_factor": _rotated_fraction(header),
            },
        },
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": header.num_rows(table) if width else 1,
    }


def _rotated_fraction(header: Header) -> float:
    """Returns the fraction of pairs that RoPE rotates; in files, the other pairs have a frequency
    factor of 1e30.
    """
    name = "rope_freqs.weight"
    if not header.has(name):
        return 1.0
    factors = header.file.tensor(name).dequantize()
    num_rotated = int(np.count_nonzero(factors == 1))
    if (factors[:num_rotated] != 1).any() or (factors[num_rotated:] < 1e29).any():
        raise UnsupportedModel(
            f"{header.file.path}: {name} has unexpected values, expected 1 for the first pairs"
            " and 1e30 for the rest"
        )
    return num_rotated / len(factors)
