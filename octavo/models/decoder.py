"""The parts that pre-norm decoders share: their shape, cache groups, the block, and the usual
attention and MLPs.

A family's file builds its own parts and hands them to `build_decoder`. Weight names are those of
Hugging Face's checkpoints of the Llama line (`model.layers.N.self_attn.q_proj.weight`). Knows no
device and no file. Block: Touvron et al. 2023; GQA: Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.pooled_row import pooled_row
from octavo.models.pooling import PooledHead, pooled_head
from octavo.program.builder import Builder
from octavo.program.ops import Activation, AlibiBias, MaskKind, RopeTable
from octavo.program.program import CacheGroup, Program, Value, Weight

Sublayer = Callable[[Builder, Value, int], Value]
"""Appends the attention or the MLP of layer i: takes normed rows and returns what is added to the
residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    """Whether the output layer is the token embedding."""
    pooled: PooledHead | None = None
    """Head that makes one row of each text; None where the model generates."""

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        kv_width = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_width, kv_width

    @staticmethod
    def read(
        config: HfConfig,
        *,
        head_dim: int | None = None,
        norm_eps: float = 1e-6,
        eps_name: str = "rms_norm_eps",
        tied: bool = False,
    ) -> DecoderShape:
        """Reads the shape from a config; the keyword arguments are the family's defaults, head_dim
        None being hidden_size / num_attention_heads.
        """
        hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
        num_kv_heads = config.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"config.json: num_attention_heads {num_heads} is no multiple of"
                f" num_key_value_heads {num_kv_heads}"
            )
        return DecoderShape(
            vocab_size=config.integer("vocab_size", low=1),
            hidden_size=hidden_size,
            num_layers=config.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.size("head_dim", head_dim or hidden_size // num_heads),
            norm_eps=config.number(eps_name, norm_eps),
            tied=config.ties_head(tied),
            pooled=pooled_head(config),
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache group and layer in it of each layer's K and V, and the mask of its queries."""

    group: str
    layer: int
    mask: MaskKind


@dataclass(frozen=True, slots=True)
class CachePlan:
    groups: tuple[CacheGroup, ...]
    layers: tuple[LayerCache, ...]


def plan_cache(shape: DecoderShape, windows: Sequence[int | None]) -> CachePlan:
    """Puts full and sliding-window layers into groups of their own; `windows` has one entry for
    each layer.
    """
    full = [i for i, window in enumerate(windows) if window is None]
    sliding = [i for i, window in enumerate(windows) if window is not None]
    heads = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
    groups = [CacheGroup("full", "full", len(full), *heads)] if full else []
    if sliding:
        groups.append(
            CacheGroup("window", "window", len(sliding), *heads, window=windows[sliding[0]])
        )
    layers = {i: LayerCache("full", n, "causal") for n, i in enumerate(full)}
    layers |= {i: LayerCache("window", n, "window") for n, i in enumerate(sliding)}
    return CachePlan(tuple(groups), tuple(layers[i] for i in range(len(windows))))


Projection = Callable[[Builder, Value, str], tuple[Value, Value, Value]]
"""Appends the products that make q, k and v of normed rows; takes the attention's module name."""

Norm = Callable[[Builder, Value, str], Value]
"""Appends a norm of the named module."""


def rms_norm(eps: float, *, offset: float = 0.0) -> Norm:
    """Returns the norm by the root mean square; `offset` is added to its weight (Gemma)."""
    return lambda b, x, name: b.rms_norm(x, name, eps, weight_offset=offset)


def layer_norm(eps: float, *, bias: bool = True, weight: bool = True, offset: float = 0.0) -> Norm:
    """Returns the centered norm; without `weight` it multiplies with 1, and `offset` is added to
    the weight (Nemotron).
    """
    return lambda b, x, name: b.layer_norm(
        x, name, eps, bias=bias, has_weight=weight, weight_offset=offset
    )


def separate_qkv(
    shape: DecoderShape,
    *,
    bias: bool = False,
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
) -> Projection:
    """Returns the projection with a module for each of q, k and v."""
    widths = shape.qkv_widths

    def project(b: Builder, x: Value, module: str) -> tuple[Value, Value, Value]:
        q, k, v = (
            b.linear(x, f"{module}.{name}", width, bias=bias)
            for name, width in zip(names, widths, strict=True)
        )
        return q, k, v

    return project


def stacked_qkv(shape: DecoderShape, name: str, *, bias: bool = False) -> Projection:
    """Returns the projection of one module whose rows are all of q, then k, then v."""
    widths = shape.qkv_widths

    def project(b: Builder, x: Value, module: str) -> tuple[Value, Value, Value]:
        q, k, v = (
            linear_part(b, x, f"{module}.{name}", Rows(width, sum(widths), start), bias=bias)
            for width, start in zip(widths, (0, widths[0], widths[0] + widths[1]), strict=True)
        )
        return q, k, v

    return project


def grouped_qkv(shape: DecoderShape, name: str, *, bias: bool = False) -> Projection:
    """Returns the projection of one module whose rows are, for each kv head, its query heads', its
    key and its value (GPT-NeoX, BLOOM, Falcon).
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a checkpoint's tensor: `run` of every `step` from `start` on, `width` in all."""

    width: int
    total: int
    """Number of rows that the tensor has."""
    start: int = 0
    step: int = 1
    run: int = 1


def linear_part(b: Builder, x: Value, module: str, rows: Rows, *, bias: bool = False) -> Value:
    """Appends the product with some rows of a module's matrix."""
    picked = (False, rows.total, rows.start, rows.step, rows.run)
    weight = Weight(f"{module}.weight", (rows.width, x.width), (), *picked)
    added = Weight(f"{module}.bias", (rows.width,), (), *picked) if bias else None
    return b.linear_of(x, weight, added, name=module)


OwnNorms = Literal["", "shared", "one tensor", "modules"]
"""Centered norms of the heads of q and k: none, one with a bias for all (Phi), or weights for each
head, in one tensor (Command R+) or a module a head (StableLM 12B)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Grouped-query attention. `ropes` has one table for each layer, None for one without rope."""

    shape: DecoderShape
    caches: Sequence[LayerCache]
    ropes: Sequence[RopeTable | None]
    scale: float
    project: Projection | None = None
    """Products that make q, k and v; None: three modules, with biases where `qkv_bias` is set."""
    module: str = "self_attn"
    out: str = "o_proj"
    layers: str = "model.layers"
    rope_style: Literal["half", "interleaved"] = "half"
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    """Whether q and k are normed head by head (Qwen3, Gemma 3)."""
    row_norms: bool = False
    """Whether q and k are normed over all heads together (OLMo 2)."""
    own_norms: OwnNorms = ""
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """Modules of those norms."""
    norm_offset: float = 0.0
    clip: float | None = None
    """Bound on the magnitudes of q, k and v, behind their norms (OLMo)."""
    k_factor: float = 1.0
    """Factor on k before it turns (Falcon-H1)."""
    turned_norms: bool = False
    """Whether q and k are normed without weights, head by head, once they are turned (Llama 4)."""
    sinks: bool = False
    sees_ahead: bool = False
    """Whether the step may let rows see later ones (Gemma 3's images)."""
    softcap: float | None = None
    bias: AlibiBias | None = None
    gated: bool = False
    """Whether what a head reads is multiplied with the sigmoid of a gate, whose rows lie behind the
    head's in the module of q (Qwen3-Next)."""

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        return self.of_module(b, x, f"{self.layers}.{layer}.{self.module}", layer)

    def of_module(self, b: Builder, x: Value, name: str, layer: int) -> Value:
        """Appends the attention of a layer whose module has that name."""
        shape = self.shape
        cache = self.caches[layer]
        rope = self.ropes[layer]
        project = self.project or separate_qkv(shape, bias=self.qkv_bias)
        if self.gated:
            (q, gate), (k, v) = self._with_gate(b, x, name), self._keys(b, x, name)
        else:
            q, k, v = project(b, x, name)
        if self.head_norms or self.row_norms or self.own_norms:
            q, k = (
                self._normed(b, x, f"{name}.{norm}")
                for x, norm in zip((q, k), self.norm_names, strict=True)
            )
        q, k, v = (b.clip(part, self.clip) for part in (q, k, v))
        k = b.scale(k, self.k_factor)
        if rope is not None:
            q = b.rope(q, shape.num_heads, rope, style=self.rope_style)
            k = b.rope(k, shape.num_kv_heads, rope, style=self.rope_style)
            if self.turned_norms:
                q, k = self._scaled(b, q, f"{name}.q"), self._scaled(b, k, f"{name}.k")
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
        """Appends the products that make q and its gate."""
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
        """Appends the products that make k and v."""
        return [
            b.linear(x, f"{name}.{part}", self.shape.qkv_widths[1], bias=self.qkv_bias)
            for part in ("k_proj", "v_proj")
        ]

    def _scaled(self, b: Builder, x: Value, name: str) -> Value:
        return b.rms_norm(
            x, name, self.shape.norm_eps, has_weight=False, group_width=self.shape.head_dim
        )

    def _normed(self, b: Builder, x: Value, name: str) -> Value:
        eps, dim = self.shape.norm_eps, self.shape.head_dim
        if self.own_norms == "shared":
            return b.layer_norm(x, name, eps, group_width=dim)
        if self.own_norms:
            return b.head_norm(x, name, eps, head_dim=dim, is_apart=self.own_norms == "modules")
        width = 0 if self.row_norms else self.shape.head_dim
        return b.rms_norm(
            x, name, self.shape.norm_eps, weight_offset=self.norm_offset, group_width=width
        )


def plain_mlp(
    b: Builder,
    x: Value,
    name: str,
    width: int,
    activation: Activation,
    *,
    names: tuple[str, str] = ("fc1", "fc2"),
    bias: bool = True,
) -> Value:
    """Appends second(f(first(x))), with `width` columns inside."""
    inner = b.act(b.linear(x, f"{name}.{names[0]}", width, bias=bias), activation)
    return b.linear(inner, f"{name}.{names[1]}", x.width, bias=bias)


def stacked_gated_mlp(
    b: Builder,
    x: Value,
    name: str,
    width: int,
    activation: Activation,
    *,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    bias: bool = False,
) -> Value:
    """Appends a gated MLP whose gate and up projection are one module, the gate's rows first."""
    gate, up = (
        linear_part(b, x, f"{name}.{names[0]}", Rows(width, 2 * width, start), bias=bias)
        for start in (0, width)
    )
    return b.linear(b.act_mul(gate, up, activation), f"{name}.{names[1]}", x.width, bias=bias)


def gated_mlp(
    b: Builder, x: Value, name: str, width: int, activation: Activation, *, bias: bool = False
) -> Value:
    """Appends down(f(gate(x)) * up(x)), with `width` columns inside."""
    gate = b.linear(x, f"{name}.gate_proj", width, bias=bias)
    up = b.linear(x, f"{name}.up_proj", width, bias=bias)
    return b.linear(b.act_mul(gate, up, activation), f"{name}.down_proj", x.width, bias=bias)


def gated_experts(
    b: Builder,
    routed: tuple[Value, Value, Value],
    name: str,
    *,
    num_experts: int,
    width: int,
    activation: Activation,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:
    """Appends the chosen experts' gated MLPs, weighted and summed. Checkpoints keep one tensor for
    each expert and projection; `names` are those of gate, up and down.
    """
    rows, ids, weights = routed
    hidden_size = rows.width

    def weight(projection: str, out_width: int, in_width: int) -> Weight:
        sources = tuple(f"{name}.{e}.{projection}.weight" for e in range(num_experts))
        return Weight(f"{name}.{projection}.weight", (num_experts, out_width, in_width), sources)

    gate = b.grouped_linear(rows, ids, weight(names[0], width, hidden_size))
    up = b.grouped_linear(rows, ids, weight(names[1], width, hidden_size))
    down = b.grouped_linear(
        b.act_mul(gate, up, activation), ids, weight(names[2], hidden_size, width)
    )
    return b.combine(down, weights)


@dataclass(frozen=True, slots=True)
class NormNames:
    """Module names of a layer's norms, None for one that the family does not have."""

    before_attention: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    """Norm before the MLP; None where it reads what the attention reads, in a parallel frame."""
    after_attention: str | None = None
    after_mlp: str | None = None


AFTER_ONLY = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
"""Norms behind each sublayer and none before it (OLMo 2, EXAONE 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The surroundings of attention and MLP: names of modules, norms, sums and factors."""

    norms: NormNames = NormNames()
    norm: Norm | None = None
    """Norm of every place; None: by the root mean square."""
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    head_bias: bool = False
    positions: Callable[[Builder], Value] | None = None
    """Appends learned embeddings of positions, which are added to the tokens'."""
    embedding_norm: str | None = None
    projected_width: int | None = None
    """Columns of the embeddings where `projections` make the layers' columns of them, and then the
    head's of the layers' (OPT-350m)."""
    projections: tuple[str, str] = ("project_in", "project_out")
    norms_sums: bool = False
    """Whether a layer's norms are behind its sums, x = norm(x + sublayer(x)), by the names of those
    before its sublayers (OPT-350m)."""
    parallel: bool = False
    """Whether attention and MLP both read the layer's input: x += attention(..) + mlp(..)."""
    embedding_scale: float = 1.0
    takes_rows: bool = False
    """Whether rows from outside may stand in for embeddings (images)."""
    residual_scale: float = 1.0
    """Factor on what a sublayer adds (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None


PLAIN = Frame()
"""Llama's frame."""


@dataclass(frozen=True, slots=True)
class PredictionLayer:
    """The layer behind a family's last one, which predicts one token more."""

    shape: DecoderShape
    """Shape of the model, whose number of layers is the layer's own number."""
    group: CacheGroup
    """Group of its K and V, of one layer."""
    attention: Sublayer
    mlp: Sublayer


def build_decoder(
    shape: DecoderShape,
    groups: tuple[CacheGroup, ...],
    attention: Sublayer,
    mlp: Sublayer | None,
    frame: Frame = PLAIN,
) -> dict[str, Program]:
    """Builds the decoder: x = embedding; in each layer x += attention(norm(x)), x += mlp(norm(x));
    logits = head(norm(sampled rows of x)). Without `mlp` a layer has one sublayer. A model that
    pools ends with a row of each request instead.
    """
    b = Builder("decoder", groups, shape.vocab_size)
    make_norm = frame.norm or rms_norm(shape.norm_eps)

    def norm(x: Value, name: str | None) -> Value:
        return x if name is None else make_norm(b, x, name)

    x = b.embedding(
        b.token_ids(),
        frame.embedding,
        shape.vocab_size,
        frame.projected_width or shape.hidden_size,
        scale=frame.embedding_scale,
    )
    if frame.takes_rows:
        x = b.scatter_rows(x)
    if frame.projected_width is not None:
        x = b.linear(x, frame.projections[0], shape.hidden_size)
    if frame.positions is not None:
        x = b.add(x, frame.positions(b))
    x = norm(x, frame.embedding_norm)
    layer = _Layers(attention, mlp, frame, norm)
    for i in range(shape.num_layers):
        x = layer(b, x, i)
    return finish_decoder(b, x, shape, frame)


def finish_decoder(b: Builder, x: Value, shape: DecoderShape, frame: Frame) -> dict[str, Program]:
    """Ends a decoder with the logits of sampled rows, or with a row of each request."""
    make_norm = frame.norm or rms_norm(shape.norm_eps)
    matrix = frame.embedding if shape.tied else frame.head

    def end(rows: Value) -> Value:
        rows = rows if frame.final_norm is None else make_norm(b, rows, frame.final_norm)
        if frame.projected_width is None:
            return rows
        return b.linear(rows, frame.projections[1], frame.projected_width)

    if shape.pooled is not None:

        def logit(row: Value, token_id: int) -> Value:
            rows = Rows(1, shape.vocab_size, token_id, shape.vocab_size)
            one = linear_part(b, row, matrix, rows, bias=frame.head_bias)
            return b.softcap(b.scale(one, frame.logit_scale), frame.logit_softcap)

        made = pooled_row(b, x, shape.pooled, end, logit)
        return {"decoder": b.finish(pooled=made)}
    x = end(b.gather_rows(x))
    logits = b.linear_of(
        x,
        Weight(f"{matrix}.weight", (shape.vocab_size, x.width)),
        Weight(f"{frame.head}.bias", (shape.vocab_size,)) if frame.head_bias else None,
        name=matrix,
    )
    logits = b.softcap(b.scale(logits, frame.logit_scale), frame.logit_softcap)
    return {"decoder": b.finish(logits=logits)}


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a decoder, each appended by a call."""

    attention: Sublayer
    mlp: Sublayer | None
    frame: Frame
    norm: Callable[[Value, str | None], Value]

    def __call__(self, b: Builder, x: Value, i: int) -> Value:
        """Appends layer i and returns the residual stream behind it."""
        frame, names = self.frame, self.frame.norms

        def norm(rows: Value, module: str | None) -> Value:
            return self.norm(rows, module and f"{frame.layers}.{i}.{module}")

        if frame.norms_sums:
            x = norm(b.add(x, self.attention(b, x, i)), names.before_attention)
            assert self.mlp is not None, "layers of one sublayer have their norm before it"
            return norm(b.add(x, self.mlp(b, x, i)), names.before_mlp)
        normed = norm(x, names.before_attention)
        h = norm(self.attention(b, normed, i), names.after_attention)
        after = b.add(x, b.scale(h, frame.residual_scale))
        if self.mlp is None:
            return after
        if not frame.parallel:
            rows = norm(after, names.before_mlp)
        else:
            rows = normed if names.before_mlp is None else norm(x, names.before_mlp)
        h = norm(self.mlp(b, rows, i), names.after_mlp)
        return b.add(after, b.scale(h, frame.residual_scale))
