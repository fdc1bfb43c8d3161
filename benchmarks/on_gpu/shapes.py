"""The shape of the measured model, and its arithmetic: what a step must read and compute at
least."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The shape of a dense llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    context: int

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns [out, in] of each product of a layer."""
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q, k, v": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate, up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    @property
    def layer_numbers(self) -> int:
        """Returns the count of numbers in a layer's matrices."""
        return sum(outputs * inputs for outputs, inputs in self.matrices.values())

    def kv_bytes(self, num_tokens: int, *, number_bytes: int = 2) -> int:
        """Returns the bytes of keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * number_bytes * num_tokens

    def prefill_operations(self, num_tokens: int) -> float:
        """Returns the operations of a prompt computed from its beginning, whose last row goes
        through the head.
        """
        products = 2 * num_tokens * self.layers * self.layer_numbers + 2 * self.vocab * self.hidden
        return products + self.layers * attention_operations(
            num_tokens, self.heads, self.head_width
        )


def attention_operations(num_tokens: int, heads: int, head_width: int) -> float:
    """Returns the operations of a causal prompt's attention in one layer: each row with the keys
    and values up to its own.
    """
    return 4 * heads * head_width * num_tokens * (num_tokens + 1) / 2


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128, 128256, 16384)
TINY = Shape(64, 96, 2, 4, 2, 16, 320, 1024)


def shape_of(*, tiny: bool) -> Shape:
    return TINY if tiny else LLAMA_8B


@contextmanager
def model_of(shape: Shape) -> Iterator[Path]:
    """Makes a directory with the shape's config.json, and no weights."""
    with tempfile.TemporaryDirectory(prefix="octavo-shape-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(shape.config))
        yield path
