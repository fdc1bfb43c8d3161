"""Makes `moe-2b`, the experts' standard model: a random qwen3_moe in Q4_0, one GGUF file that
Octavo and llama.cpp both read.

    python benchmarks/moe_2b.py FILE.gguf [--skew 0.5]

1.93 G parameters, of which a token uses 0.34 G. Its numbers are seeded, so the file is the same
each time; it measures speed, and says nothing. With a skew S, the router's row of the n-th expert
is n^-S times as long, so that routers prefer some experts. Needs the package gguf (extra `dev`).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

GROUP = 32
BLOCK_BYTES = 18
"""Bytes of 32 weights in Q4_0: a scale in fp16, then the codes."""
WIDTH = 0.02
"""Standard deviation of the weights."""
CODE_WIDTH = 4.6
"""Standard deviation of codes that are equally often each of -8 to 7."""


@dataclass(frozen=True)
class Shape:
    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    experts: int = 64
    chosen: int = 8
    width: int = 384
    vocabulary: int = 49_152
    context: int = 32_768


def matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of all quantised tensors."""
    s = shape
    yield "token_embd.weight", (s.vocabulary, s.hidden)
    yield "output.weight", (s.vocabulary, s.hidden)
    for layer in range(s.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_q.weight", (s.heads * s.head_dim, s.hidden)
        yield f"{block}.attn_k.weight", (s.kv_heads * s.head_dim, s.hidden)
        yield f"{block}.attn_v.weight", (s.kv_heads * s.head_dim, s.hidden)
        yield f"{block}.attn_output.weight", (s.hidden, s.heads * s.head_dim)
        yield f"{block}.ffn_gate_exps.weight", (s.experts, s.width, s.hidden)
        yield f"{block}.ffn_up_exps.weight", (s.experts, s.width, s.hidden)
        yield f"{block}.ffn_down_exps.weight", (s.experts, s.hidden, s.width)


def floats(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the names and shapes of norms and routers, which stay fp32."""
    yield "output_norm.weight", (shape.hidden,)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (shape.hidden,)
        yield f"{block}.ffn_norm.weight", (shape.hidden,)
        yield f"{block}.attn_q_norm.weight", (shape.head_dim,)
        yield f"{block}.attn_k_norm.weight", (shape.head_dim,)
        yield f"{block}.ffn_gate_inp.weight", (shape.experts, shape.hidden)


def q4_0(draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns random blocks as the file holds them, `[..., out, bytes of a row]`."""
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // GROUP, BLOCK_BYTES), np.uint8)
    scale = np.array([WIDTH / CODE_WIDTH], np.float16).view(np.uint8)
    blocks[..., :2] = scale
    return blocks.reshape(*shape[:-1], -1)


def write_header(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.experts * shape.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_expert_feed_forward_length(shape.width)
    write_vocabulary(writer, shape.vocabulary)


def write_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Writes the tokens of all bytes and others that no text has, as in GPT-2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [spelled[byte] for byte in range(256)]
    tokens.append("hi")
    tokens += [f"<|unused_{i}|>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (size - 257))
    writer.add_token_merges(["h i"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 2)


def write(path: Path, shape: Shape, skew: float = 0.0) -> None:
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, "qwen3moe")
    write_header(writer, shape)
    kind = GGMLQuantizationType.Q4_0
    for name, size in matrices(shape):
        writer.add_tensor(name, q4_0(draw, size), raw_dtype=kind)
    for name, size in floats(shape):
        plain = np.ones(size) if len(size) == 1 else WIDTH * draw.standard_normal(size)
        if len(size) > 1:
            order = np.random.default_rng(len(name)).permutation(size[0])
            plain *= ((1 + order) ** -skew)[:, None]
        writer.add_tensor(name, plain.astype(np.float32))
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    """Writes what a writer was given into its file, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of a command line that names the file to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    return parser


def main() -> None:
    parser = file_parser(__doc__)
    parser.add_argument("--skew", type=float, default=0.0)
    args = parser.parse_args()
    write(args.file, Shape(), args.skew)


if __name__ == "__main__":
    main()
