"""Quality of int4 made at load, from weights that no grid of 32 neighbours fits already.

SmolLM2's file is Q4_1, whose grid packing at load finds again. So its channels are put in another
order first, which changes nothing of what the model computes: the hidden ones everywhere, those
inside each MLP, and those of each value head.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from tests.quality.test_smollm2 import perplexity_script

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the default model in fp32, its channels in another order."""
    checkpoint = open_checkpoint(resolve("smollm2"))
    config, rng = checkpoint.config, np.random.default_rng(0)
    num_heads, num_kv_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    hidden = rng.permutation(config["hidden_size"])
    made = {}
    for layer in range(config["num_hidden_layers"]):
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
    assert made.keys() == set(checkpoint.names())
    tensors = {
        name: reordered(checkpoint.tensor(name).dequantize(), *order)
        for name, order in made.items()
    }
    path = tmp_path_factory.mktemp("shuffled")
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def reordered(array: np.ndarray, rows: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray:
    array = array if rows is None else array[rows]
    return np.ascontiguousarray(array if columns is None else array[:, columns])


def rise(model: Path, num_windows: int | None, **options: str) -> float:
    found = perplexity_script().measure(num_windows, model=str(model), **options)
    return found["rise_percent"]


def rise_when_shuffled(shuffled: Path, num_windows: int | None, **options: str) -> float:
    return rise(shuffled, num_windows, tokenizer=str(resolve("smollm2")), **options)


def test_the_order_of_channels_changes_nothing(shuffled: Path) -> None:
    assert abs(rise_when_shuffled(shuffled, 1, dtype="float32")) < 0.01


def test_int4_of_three_windows(shuffled: Path) -> None:
    assert 1.0 < rise_when_shuffled(shuffled, 3, quantization="int4") <= 5.5, (
        "below 1% the file's own grid was found again"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "bound_percent"), [("int4", 5.0), ("int8", 1.0)])
def test_of_the_whole_text(shuffled: Path, quantization: str, bound_percent: float) -> None:
    """The rise of perplexity over the whole text is what docs/concepts/numbers.md promises of int4,
    within a percent.
    """
    assert rise_when_shuffled(shuffled, None, quantization=quantization) <= bound_percent


@pytest.mark.slow
def test_gemma3() -> None:
    """Gemma 3, from the other grid of Q4_K and Q6_K, stays close to the same file dequantised."""
    assert rise(resolve("gemma3-270m"), 6, reference="float32", quantization="int4") <= 5.0
