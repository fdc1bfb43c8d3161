"""SmolLM2 with its channels in another order: the hidden ones everywhere, those inside each MLP,
and those of each value head, which changes nothing of what the model computes.

Its file is Q4_1, whose grid of 32 neighbours any packing would find again; here none fits already.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint


def write_shuffled(path: Path, num_layers: int | None = None) -> Path:
    """Writes the default model in fp32, its channels in another order, or its first layers."""
    checkpoint = open_checkpoint(resolve("smollm2"))
    config, rng = dict(checkpoint.config), np.random.default_rng(0)
    num_layers = num_layers or config["num_hidden_layers"]
    num_heads, num_kv_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    hidden = rng.permutation(config["hidden_size"])
    made = {}
    for layer in range(num_layers):
        inner = rng.permutation(config["intermediate_size"])
        heads = [rng.permutation(head_dim) for _ in range(num_kv_heads)]
        values = np.concatenate([head * head_dim + heads[head] for head in range(num_kv_heads)])
        attended = np.concatenate(
            [head * head_dim + heads[head * num_kv_heads // num_heads] for head in range(num_heads)]
        )
        orders = {
            "self_attn.q_proj": (None, hidden),
            "self_attn.k_proj": (None, hidden),
            "self_attn.v_proj": (values, hidden),
            "self_attn.o_proj": (hidden, attended),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden, None),
            "post_attention_layernorm": (hidden, None),
        }
        made |= {f"model.layers.{layer}.{name}.weight": order for name, order in orders.items()}
    made |= {"model.embed_tokens.weight": (None, hidden), "model.norm.weight": (hidden, None)}
    assert made.keys() <= set(checkpoint.names())
    config["num_hidden_layers"] = num_layers
    tensors = {
        name: _reordered(checkpoint.tensor(name).dequantize(), *order)
        for name, order in made.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def _reordered(
    array: np.ndarray, rows: np.ndarray | None, columns: np.ndarray | None
) -> np.ndarray:
    array = array if rows is None else array[rows]
    return np.ascontiguousarray(array if columns is None else array[:, columns])
