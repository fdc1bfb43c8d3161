"""Common attention of pre-norm decoders, and projections of q, k and v.

GQA: Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.models.decoder import DecoderShape, LayerCache
from octavo.models.matrix_rows import Rows, linear_part
from octavo.program.builder import Builder
from octavo.program.ops import AlibiBias, RopeTable
from octavo.program.program import Value, Weight

Projection = Callable[[Builder, Value, str], tuple[Value, Value, Value]]
"""Appends the projections of q, k and v; takes the attention's module name."""


def separate_qkv(shape: DecoderShape, *, bias: bool) -> Projection:
    """Returns a projection with separate modules for q, k and v."""
    widths = shape.qkv_widths

    def project(b: Builder, x: Value, module: str) -> tuple[Value, Value, Value]:
        q, k, v = (
            b.linear(x, f"{module}.{name}", width, bias=bias)
            for name, width in zip(("q_proj", "k_proj", "v_proj"), widths, strict=True)
        )
        return q, k, v

    return project


def stacked_qkv(shape: DecoderShape, name: str, *, bias: bool = False) -> Projection:
    """Returns a projection from one module with rows of q, then k, then v."""
    widths = shape.qkv_widths

    def project(b: Builder, x: Value, module: str) -> tuple[Value, Value, Value]:
        q, k, v = (
            linear_part(b, x, f"{module}.{name}", Rows(width, sum(widths), start), bias=bias)
            for width, start in zip(widths, (0, widths[0], widths[0] + widths[1]), strict=True)
        )
        return q, k, v

    return project


def grouped_qkv(shape: DecoderShape, name: str, *, bias: bool = False) -> Projection:
    """Returns a projection from one module with rows grouped by kv head: each head's queries, key
    and value (GPT-NeoX, BLOOM, Falcon).
    """
    dim, lanes = shape.head_dim, shape.num_heads // shape.num_kv_heads
    step = (lanes + 2) * dim
    total = step * shape.num_kv_heads

    def project(b: Builder, x: Value, module: str) -> tuple[Value, Value, Value]:
        q, k, v = (
            linear_part(b, x, f"{module}.{name}", Rows(width, total, start, step, run), bias=bias)
            for width, start, run in zip(
                shape.qkv_widths, (0, lanes * dim, lanes * dim + dim), (lanes * dim, dim, dim),
                strict=True,
            )
        )  # fmt: skip
        return q, k, v

    return project


OwnNorms = Literal["", "shared", "one tensor", "modules"]
"""LayerNorms of q and k heads: none, shared with a bias (Phi), or weights per head, in one tensor
(Command R+) or a module per head (StableLM 12B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Grouped-query attention. `ropes` has a table per layer, None for layers without RoPE."""

    shape: DecoderShape
    caches: Sequence[LayerCache]
    ropes: Sequence[RopeTable | None]
    scale: float
    project: Projection | None = None
    """Projections of q, k and v; None: three modules, with biases if `qkv_bias`."""
    module: str = "self_attn"
    out: str = "o_proj"
    layers: str = "model.layers"
    rope_style: Literal["half", "interleaved"] = "half"
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    """Whether q and k are normed per head (Qwen3, Gemma 3)."""
    row_norms: bool = False
    """Whether q and k are normed over all heads (OLMo 2)."""
    own_norms: OwnNorms = ""
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """Module names of those norms."""
    norms_last: bool = False
    """Whether those norms follow RoPE (Hunyuan)."""
    norm_offset: float = 0.0
    clip: float | None = None
    """Clips q, k and v after their norms (OLMo)."""
    k_factor: float = 1.0
    """Factor on k before RoPE (Falcon-H1)."""
    turned_norms: bool = False
    """Whether q and k get weightless head norms after RoPE (Llama 4)."""
    sinks: bool = False
    sees_ahead: bool = False
    """Whether rows may attend to later ones (Gemma 3's images)."""
    growths: Sequence[Weight | None] = ()
    """Query scaling table per layer, from `query_growth`; (): none."""
    softcap: float | None = None
    bias: AlibiBias | None = None
    gated: bool = False
    """Whether head outputs are multiplied by the sigmoid of a gate, stored after each head's rows
    in the q module (Qwen3-Next)."""

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        return self.of_module(b, x, f"{self.layers}.{layer}.{self.module}", layer)

    def of_module(self, b: Builder, x: Value, name: str, layer: int) -> Value:
        """Appends the attention of a layer with the given module name."""
        shape = self.shape
        cache = self.caches[layer]
        rope = self.ropes[layer]
        project = self.project or separate_qkv(shape, bias=self.qkv_bias)
        if self.gated:
            (q, gate), (k, v) = self._with_gate(b, x, name), self._keys(b, x, name)
        else:
            q, k, v = project(b, x, name)
        has_norms = self.head_norms or self.row_norms or bool(self.own_norms)
        if has_norms and not self.norms_last:
            q, k = self._both_normed(b, (q, k), name)
        q, k, v = (b.clip(part, self.clip) for part in (q, k, v))
        k = b.scale(k, self.k_factor)
        if rope is not None:
            q = b.rope(q, shape.num_heads, rope, style=self.rope_style)
            k = b.rope(k, shape.num_kv_heads, rope, style=self.rope_style)
            if self.turned_norms:
                q, k = self._scale(b, q, f"{name}.q"), self._scale(b, k, f"{name}.k")
        if has_norms and self.norms_last:
            q, k = self._both_normed(b, (q, k), name)
        growth = self.growths[layer] if self.growths else None
        if growth is not None:
            q = b.mul(q, b.embed_positions(growth))
        b.kv_write(cache.group, cache.layer, (k,), v)
        out = b.attention(
            q,
            cache.group,
            cache.layer,
            num_heads=shape.num_heads,
            scale=self.scale,
            mask=cache.mask,
            softcap=self.softcap,
            sinks=Weight(f"{name}.sinks", (shape.num_heads,)) if self.sinks else None,
            bias=self.bias,
            sees_ahead=self.sees_ahead,
        )
        if self.gated:
            out = b.act_mul(gate, out, "sigmoid")
        return b.linear(out, f"{name}.{self.out}", shape.hidden_size, bias=self.out_bias)

    def _with_gate(self, b: Builder, x: Value, name: str) -> list[Value]:
        """Appends the projections of q and its gate."""
        dim, width = self.shape.head_dim, self.shape.qkv_widths[0]
        return [
            linear_part(
                b,
                x,
                f"{name}.q_proj",
                Rows(width, 2 * width, start, 2 * dim, dim),
                bias=self.qkv_bias,
            )
            for start in (0, dim)
        ]

    def _keys(self, b: Builder, x: Value, name: str) -> list[Value]:
        """Appends the projections of k and v."""
        return [
            b.linear(x, f"{name}.{part}", self.shape.qkv_widths[1], bias=self.qkv_bias)
            for part in ("k_proj", "v_proj")
        ]

    def _scale(self, b: Builder, x: Value, name: str) -> Value:
        return b.rms_norm(
            x, name, self.shape.norm_eps, has_weight=False, group_width=self.shape.head_dim
        )

    def _both_normed(self, b: Builder, parts: tuple[Value, Value], name: str) -> list[Value]:
        names = zip(parts, self.norm_names, strict=True)
        return [self._normalize(b, x, f"{name}.{norm}") for x, norm in names]

    def _normalize(self, b: Builder, x: Value, name: str) -> Value:
        eps, dim = self.shape.norm_eps, self.shape.head_dim
        if self.own_norms == "shared":
            return b.layer_norm(x, name, eps, group_width=dim)
        if self.own_norms:
            return b.head_norm(x, name, eps, head_dim=dim, is_apart=self.own_norms == "modules")
        width = 0 if self.row_norms else self.shape.head_dim
        return b.rms_norm(
            x, name, self.shape.norm_eps, weight_offset=self.norm_offset, group_width=width
        )
