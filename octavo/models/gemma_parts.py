"""Components of both Gemma 3n and Gemma 4: attention whose last layers read the KV cache of earlier
layers, and per-layer embeddings.

Gemma team 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.models.decoder import DecoderShape, LayerCache
from octavo.models.matrix_rows import Rows, linear_part
from octavo.program.builder import Builder
from octavo.program.ops import Embedding, RopeTable
from octavo.program.program import Span, Value, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKvAttention:
    """Attention with RMS norms of the q, k and v heads and a scale of 1."""

    shapes: Sequence[DecoderShape]
    """Shape of each layer."""
    caches: Sequence[LayerCache]
    ropes: Sequence[RopeTable]
    num_own: int
    """Number of layers that write KV."""
    bias: bool
    keys_as_values: Sequence[bool] | None = None
    """Whether each layer has no v_proj and uses the output of k_proj (Gemma 4); None: no layer."""

    def __call__(self, b: Builder, x: Value, i: int) -> Value:
        shape, cache, rope = self.shapes[i], self.caches[i], self.ropes[i]
        name = f"model.layers.{i}.self_attn"
        q_width, kv_width, _ = shape.qkv_widths
        dim, eps = shape.head_dim, shape.norm_eps
        q = b.linear(x, f"{name}.q_proj", q_width, bias=self.bias)
        q = b.rms_norm(q, f"{name}.q_norm", eps, group_width=dim)
        q = b.rope(q, shape.num_heads, rope)
        if i < self.num_own:
            k = v = b.linear(x, f"{name}.k_proj", kv_width, bias=self.bias)
            if self.keys_as_values is None or not self.keys_as_values[i]:
                v = b.linear(x, f"{name}.v_proj", kv_width, bias=self.bias)
            k = b.rms_norm(k, f"{name}.k_norm", eps, group_width=dim)
            k = b.rope(k, shape.num_kv_heads, rope)
            v = b.rms_norm(v, f"{name}.v_norm", eps, has_weight=False, group_width=dim)
            b.kv_write(cache.group, cache.layer, (k,), v)
        out = b.attention(
            q, cache.group, cache.layer, num_heads=shape.num_heads, scale=1.0, mask=cache.mask
        )
        return b.linear(out, f"{name}.o_proj", shape.hidden_size, bias=self.bias)


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Per-layer embeddings: one table for all layers, plus a projection of the token embeddings."""

    shape: DecoderShape
    width: int
    vocab_size: int

    def __call__(self, b: Builder, ids: Value, embedded: Value, i: int) -> Value:
        """Appends the per-layer embeddings `[T, width]` of layer i."""
        width, total = self.width, self.shape.num_layers * self.width
        table = Weight("model.embed_tokens_per_layer.weight", (self.vocab_size, total))
        own = table_part(b, ids, table, (i * width, (i + 1) * width), scale=width**0.5)
        rows = Rows(width, total, i * width)
        projected = linear_part(b, embedded, "model.per_layer_model_projection", rows)
        projected = b.scale(projected, self.shape.hidden_size**-0.5)
        projected = b.rms_norm(projected, "model.per_layer_projection_norm", self.shape.norm_eps)
        return b.scale(b.add(projected, own), 2**-0.5)


def table_part(b: Builder, ids: Value, table: Weight, columns: Span, *, scale: float) -> Value:
    """Looks up some columns of a table; ids beyond the table read its first row."""
    part = table.part(inputs=columns)
    out = b.value(table.name.removesuffix(".weight"), ids.axis, part.shape[1])
    b.append(Embedding(out, part, ids, scale, others_first=True))
    return out


def add_constant(b: Builder, x: Value, number: float) -> Value:
    """Adds a number to each element; returns x itself if it is 0."""
    if number == 0:
        return x
    added = b.value("constant", x.axis, 1)
    table = Weight(f"constant.{number!r}", (1, 1), fill=number)
    b.append(Embedding(added, table, by_position=True, others_first=True))
    return b.add(x, added)


def scale_columns(b: Builder, x: Value, name: str, width: int | None = None) -> Value:
    """Multiplies each column by its value in the named tensor, or all by one value if `width`
    is 1.
    """
    factors = b.value(name, x.axis, width or x.width)
    table = Weight(name, (1, factors.width), (name,))
    b.append(Embedding(factors, table, by_position=True, others_first=True))
    return b.mul(x, factors)
