"""Makes `dense-1.6b`, the standard model of weights that are larger than memory: a random qwen3 in
Q4_0, one GGUF file of 0.9 GB that Octavo and llama.cpp both read.

    python benchmarks/dense_1_6b.py FILE.gguf
    python benchmarks/dense_1_6b.py FILE.gguf --shape 7b

Shapes of Qwen3-1.7B, with `7b` those of Mistral 7B (4.2 GB), a vocabulary of 49,152 and an output
layer of its own. Its numbers are seeded, so the file is the same each time; it measures speed, and
says nothing. Needs the package gguf (extra `dev`).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from moe_2b import finish, q4_0, write_vocabulary


@dataclass(frozen=True)
class DenseShape:
    hidden: int = 2048
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    width: int = 6144
    vocabulary: int = 49_152
    context: int = 32_768
    tied: bool = False
    """Whether the output layer is the embedding."""


SHAPES = {
    "1.6b": DenseShape(),
    "7b": DenseShape(hidden=4096, layers=32, heads=32, width=14_336),
}


def matrices(s: DenseShape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names and shapes of all quantised tensors."""
    yield "token_embd.weight", (s.vocabulary, s.hidden)
    if not s.tied:
        yield "output.weight", (s.vocabulary, s.hidden)
    for layer in range(s.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_q.weight", (s.heads * s.head_dim, s.hidden)
        yield f"{block}.attn_k.weight", (s.kv_heads * s.head_dim, s.hidden)
        yield f"{block}.attn_v.weight", (s.kv_heads * s.head_dim, s.hidden)
        yield f"{block}.attn_output.weight", (s.hidden, s.heads * s.head_dim)
        yield f"{block}.ffn_gate.weight", (s.width, s.hidden)
        yield f"{block}.ffn_up.weight", (s.width, s.hidden)
        yield f"{block}.ffn_down.weight", (s.hidden, s.width)


def norms(s: DenseShape) -> Iterator[tuple[str, int]]:
    """Yields the names and widths of the norms, which are ones."""
    yield "output_norm.weight", s.hidden
    for layer in range(s.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", s.hidden
        yield f"{block}.ffn_norm.weight", s.hidden
        yield f"{block}.attn_q_norm.weight", s.head_dim
        yield f"{block}.attn_k_norm.weight", s.head_dim


def write_header(writer: GGUFWriter, s: DenseShape) -> None:
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.width)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(LlamaFileType.GUESSED)
    write_vocabulary(writer, s.vocabulary)


def write(path: Path, shape: DenseShape) -> None:
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, "qwen3", use_temp_file=True)
    write_header(writer, shape)
    for name, size in matrices(shape):
        writer.add_tensor(name, q4_0(draw, size), raw_dtype=GGMLQuantizationType.Q4_0)
    for name, width in norms(shape):
        writer.add_tensor(name, np.ones(width, np.float32))
    finish(writer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the GGUF file goes")
    parser.add_argument("--shape", choices=SHAPES, default="1.6b")
    args = parser.parse_args()
    write(args.file, SHAPES[args.shape])
