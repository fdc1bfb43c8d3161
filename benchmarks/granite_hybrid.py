"""Makes `granite-hybrid-0.5b`, the standard model of recurrent states: a random granitemoehybrid in
Q4_0, one GGUF file of 0.3 GB that Octavo and llama.cpp both read.

    python benchmarks/granite_hybrid.py FILE.gguf

0.49 G parameters in the shape of Granite 4.0-H: 24 layers of Mamba 2 and four that attend, without
positions. Its numbers are seeded, so the file is the same each time; it measures speed, and says
nothing. Needs the package gguf (extra `dev`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from moe_2b import WIDTH, file_parser, finish, q4_0, write_vocabulary


@dataclass(frozen=True)
class HybridShape:
    hidden: int = 1024
    layers: int = 28
    period: int = 7
    """Layers of which the last one attends."""
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    width: int = 3072
    inner: int = 2048
    states: int = 128
    state_heads: int = 32
    taps: int = 4
    vocabulary: int = 49_152
    context: int = 32_768

    def attends(self, layer: int) -> bool:
        return layer % self.period == self.period - 1

    @property
    def convolved(self) -> int:
        """Columns of the convolution: the inner rows, B and C."""
        return self.inner + 2 * self.states


def matrices(s: HybridShape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names and shapes of all quantised tensors."""
    yield "token_embd.weight", (s.vocabulary, s.hidden)
    for layer in range(s.layers):
        block = f"blk.{layer}"
        if s.attends(layer):
            yield f"{block}.attn_q.weight", (s.heads * s.head_dim, s.hidden)
            yield f"{block}.attn_k.weight", (s.kv_heads * s.head_dim, s.hidden)
            yield f"{block}.attn_v.weight", (s.kv_heads * s.head_dim, s.hidden)
            yield f"{block}.attn_output.weight", (s.hidden, s.heads * s.head_dim)
        else:
            yield f"{block}.ssm_in.weight", (s.inner + s.convolved + s.state_heads, s.hidden)
            yield f"{block}.ssm_out.weight", (s.hidden, s.inner)
        yield f"{block}.ffn_gate.weight", (s.width, s.hidden)
        yield f"{block}.ffn_up.weight", (s.width, s.hidden)
        yield f"{block}.ffn_down.weight", (s.hidden, s.width)


def write_floats(writer: GGUFWriter, s: HybridShape, draw: np.random.Generator) -> None:
    """Writes norms, convolutions and rates, which stay fp32."""

    def add(name: str, numbers: np.ndarray) -> None:
        writer.add_tensor(name, numbers.astype(np.float32))

    add("output_norm.weight", np.ones(s.hidden))
    for layer in range(s.layers):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", np.ones(s.hidden))
        add(f"{block}.ffn_norm.weight", np.ones(s.hidden))
        if s.attends(layer):
            continue
        add(f"{block}.ssm_conv1d.weight", WIDTH * draw.standard_normal((s.convolved, s.taps)))
        add(f"{block}.ssm_conv1d.bias", np.zeros(s.convolved))
        add(f"{block}.ssm_dt.bias", np.full(s.state_heads, -2.0))
        add(f"{block}.ssm_a", -np.linspace(1, 16, s.state_heads)[:, None])
        add(f"{block}.ssm_d", np.ones((s.state_heads, 1)))
        add(f"{block}.ssm_norm.weight", np.ones((1, s.inner)))


def write_header(writer: GGUFWriter, s: HybridShape) -> None:
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.width)
    writer.add_vocab_size(s.vocabulary)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv([s.kv_heads if s.attends(i) else 0 for i in range(s.layers)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(s.head_dim)
    writer.add_rope_scaling_finetuned(False)
    writer.add_attention_scale(s.head_dim**-0.5)
    writer.add_embedding_scale(1.0)
    writer.add_residual_scale(1.0)
    writer.add_logit_scale(1.0)
    writer.add_ssm_conv_kernel(s.taps)
    writer.add_ssm_state_size(s.states)
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(s.inner)
    writer.add_ssm_time_step_rank(s.state_heads)
    write_vocabulary(writer, s.vocabulary)


def write(path: Path, shape: HybridShape) -> None:
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, "granitehybrid")
    write_header(writer, shape)
    for name, size in matrices(shape):
        writer.add_tensor(name, q4_0(draw, size), raw_dtype=GGMLQuantizationType.Q4_0)
    write_floats(writer, shape, draw)
    finish(writer)


if __name__ == "__main__":
    write(file_parser(__doc__).parse_args().file, HybridShape())
