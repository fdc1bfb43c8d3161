"""The ops that Programs consist of, each with its shapes, formula and source. Further ops:
`mixers.py` (mixing rows without attention), `expert_ops.py` (experts), `rank_ops.py` (communication
between ranks) and `family_ops.py` (used by a single family).

Shapes use one alphabet: `T` rows, `W` width, `H` query heads, `K` kv heads, `D` head size, `E`
experts, `k` experts per token, `V` vocabulary. Attributes are plain numbers and strings, so that
passes and backends can compare and hash ops. Key indices, positions, slots and block tables are not
Values: every op that needs them reads the step's batch (`executor/batch.py`). A row's key index is
its index among its request's keys; attention masks and biases depend on it. A row's positions are
only read by RoPE and learned embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.program.key_selection import KeySelection
from octavo.program.program import Op, Program, Value, Weight

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "softplus"]
MaskKind = Literal["causal", "full", "window", "chunk", "tree"]


@dataclass(frozen=True, slots=True)
class LongAngles:
    """RoPE angles for requests longer than the original context, which start at `start`
    (`octavo/engine/protocol/original_context.py`).

    A token at position p is rotated by the angle of p - start.
    """

    start: int
    inv_freq: tuple[float, ...]
    mscale: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Inverse frequencies of a RoPE, and a factor on cos and sin."""

    inv_freq: tuple[float, ...]
    """Radians per position, `rotary_dim / 2` of them."""
    mscale: float = 1.0
    """Factor on cos and sin (YaRN)."""
    axes: tuple[int, ...] = ()
    """Position axis of each frequency (M-RoPE, Wang et al. 2024); (): the first axis for all."""
    long: LongAngles | None = None
    """Angles of positions from `long.start` (LongRoPE, Ding et al. 2024); None: the same."""


@dataclass(frozen=True, slots=True)
class T5Bias:
    """T5's relative position bias: a table indexed by the bucket of key index - query index.

    Raffel et al. 2020, section 2.1; logarithmic buckets as in its reference code.
    """

    table: Weight
    """`[num_buckets, H]`"""
    num_buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class AlibiBias:
    """ALiBi: score += slope[h] * (key index - query index) (Press et al. 2022)."""

    slopes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NearBias:
    """Bidirectional window: score += FAR for keys more than `reach` keys from the query, which
    makes their weight exactly 0 (ModernBERT's local layers).
    """

    reach: int


@dataclass(frozen=True, slots=True)
class PositionBuckets:
    """Disentangled attention (DeBERTa): score += scale * (of_queries[t, h, b] + of_keys[j, h, b]),
    with b the bucket of index t - index j.

    There are `num_buckets`, half of them for each direction. Distances up to num_buckets / 4 have a
    bucket each; larger distances share logarithmic buckets up to `max_distance`. Without
    `max_distance` every distance has its own bucket. A text has at most `max_places` tokens, all
    computed in one step. He et al. 2021, section 3.1; logarithmic buckets as in its reference code.
    """

    num_buckets: int
    max_distance: int | None
    max_places: int


FAR = -1e30
"""Score offset of invisible keys. Finite, because all keys of a split may be invisible and splits
are merged by differences of their maxima."""


# -- rows in, rows out -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    """Table lookup: out[t] = table[ids[t]] * scale.

    With `by_position` the ids are positions on the step's axis `axis` plus `offset` (GPT-2, OPT;
    BERT's segments are its second axis). With `first_row` the table is one rank's part of the
    vocabulary, starting at that row; ids outside this part give zeros.
    """

    out: Value
    table: Weight
    """`[V, W]`"""
    ids: Value | None = None
    scale: float = 1.0
    by_position: bool = False
    offset: int = 0
    first_row: int | None = None
    axis: int = 0
    site: str = ""
    """Module to which an adapter may be applied; empty: none. Set by the adapters pass."""
    others_first: bool = False
    """Whether ids beyond the table read its first row (Gemma 3n's per-layer tables)."""


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """RMS norm: y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over groups of
    `group_width` columns.

    `x [T, W]`; `weight [group_width]`, shared by all groups, or `[W]`. Head norms (Qwen3, Gemma 3)
    have `group_width = D`. Zhang and Sennrich 2019.
    """

    x: Value
    out: Value
    weight: Weight
    eps: float
    weight_offset: float = 0.0
    group_width: int = 0
    """Columns normalized together; 0: the entire row."""


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """Layer norm: y = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, with the
    biased variance, over groups of `group_width` columns.

    `weight [group_width]` and `bias` are shared by all groups; or `weight [W]` without a bias. Ba
    et al. 2016.
    """

    x: Value
    out: Value
    weight: Weight
    bias: Weight | None
    eps: float
    weight_offset: float = 0.0
    group_width: int = 0
    """Columns normalized together; 0: the entire row."""


@dataclass(frozen=True, slots=True)
class PreNorm:
    """Norm that a Linear applies to x: RmsNorm, or LayerNorm if `centered`. Set by the fuse
    pass.
    """

    weight: Weight
    eps: float
    bias: Weight | None = None
    weight_offset: float = 0.0
    centered: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """Gate that a Linear applies to its two outputs, with ActMul's attributes. Set by the fuse
    pass.
    """

    activation: Activation
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """Matmul with one or several matrices: [outs...] = x @ concat(weights)^T + concat(biases), then
    the activation, if any.

    `x [T, in]`; `weights_` are stacked along the output axis; `outs` are consecutive columns of the
    result. Their widths sum to the weights' rows, but they need not correspond to the weights one
    to one, so a merged q+k+v keeps its named slices.
    """

    x: Value
    outs: tuple[Value, ...]
    weights_: tuple[Weight, ...]
    biases: tuple[Weight | None, ...] = ()
    """Empty, or one bias (or None) per weight."""
    activation: Activation | None = None
    residual: Value | None = None
    """Rows `[T, out]` added at the end; requires a single out."""
    norm: PreNorm | None = None
    """Norm applied to x; set by the fuse pass only."""
    gate: Gate | None = None
    """Gate over two weights (gate, up) of the same shape: out = ActMul(x @ gate^T, x @ up^T). Set
    by the fuse pass only."""
    sites: tuple[str, ...] = ()
    """Modules of `weights_` to which an adapter may be applied; empty: none. Set by the adapters
    pass.
    """
    skips_zeros: bool = False
    """Whether x is mostly zeros, so that weights can be skipped; does not change results. Set by
    the passes `skip_zeros` and `sparsify`."""
    threshold: float = 0.0
    """Magnitude below which sparse rows (`StepBatch.sparse_from`) treat a normed input as zero;
    adapters see the original x. Set by the pass `sparsify`."""
    scores: Value | None = None
    """Predicted scores of a gated matmul's outputs, as in ActMul; set by the fuse pass."""


@dataclass(frozen=True, slots=True)
class Add(Op):
    """out = a + b, of the same shape."""

    a: Value
    b: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Mul(Op):
    """out = a * b; `b` has the width of `a`, or fewer columns, each for equally many neighbouring
    columns of `a`: one for all, or one per head.
    """

    a: Value
    b: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """out = x * factor"""

    x: Value
    out: Value
    factor: float


@dataclass(frozen=True, slots=True)
class SoftCap(Op):
    """Soft cap: out = cap * tanh(x / cap) (Gemma 2)."""

    x: Value
    out: Value
    cap: float


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """Limits magnitudes: out = min(max(x, -limit), limit) (OLMo's q, k and v)."""

    x: Value
    out: Value
    limit: float


@dataclass(frozen=True, slots=True)
class Act(Op):
    """out = f(x) per element.

    gelu is the exact (erf) form, gelu_tanh the tanh approximation, relu2 is relu squared.
    """

    x: Value
    out: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class ActMul(Op):
    """Gated activation: out = f(gate) * (up + up_offset). Shazeer 2020.

    With `clamp` c: gate = min(gate, c), up = clip(up, -c, c) first. With `alpha`: f(g) = g *
    sigmoid(alpha * g) instead of silu (gpt_oss: clamp 7, alpha 1.702, up_offset 1).
    """

    gate: Value
    up: Value
    out: Value
    activation: Activation
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    threshold: float = 0.0
    """In sparse rows, out is zero if |f(gate)| is below this. Set by the pass `sparsify`."""
    scores: Value | None = None
    """Predicted scores `[T, width]`: in sparse rows, columns with a negative score are zero and
    need not be computed. Set by the pass `predict`."""


# -- attention and its cache -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotary position embedding: rotates `rotary_dim` columns of each head, starting at
    `rotary_start`, by the row's position on the first axis.

    `x [T, heads * head_width]`. half: pairs (i, i + rotary_dim/2), as in GPT-NeoX and Hugging Face;
    interleaved: pairs (2i, 2i+1), as in GPT-J. angle = position * table.inv_freq[i]; cos and sin
    are multiplied by table.mscale; positions from table.long.start use the angles of table.long. Su
    et al. 2021; YaRN: Peng et al. 2023.
    """

    x: Value
    out: Value
    num_heads: int
    head_width: int
    rotary_dim: int
    rotary_start: int
    table: RopeTable
    style: Literal["half", "interleaved"] = "half"


@dataclass(frozen=True, slots=True)
class KvWrite(Op):
    """Writes this step's K and V of one layer to the rows' slots in the group; slot -1 discards.

    `k_parts`, `[T, K * width]` each, are concatenated per head (MLA: latent, then rotary part); `v
    [T, K * v_width]` or None.
    """

    k_parts: tuple[Value, ...]
    v: Value | None
    group: str
    layer: int


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Attention over the request's keys in the cache group: out[t, h] = softmax(scale * q[t, h] . K
    + bias) . V.

    `q [T, H * k_width]`, `out [T, H * v_width]`; query head h reads kv head h // (H / K). `layer`
    is the layer within the group (another layer's if layers share KV). Masks: causal: key index <=
    query index, or key index < the row's limit if the step has `limits`; window: additionally key
    index > query index - window; chunk: additionally in the query's chunk of `window` keys (Llama
    4); full: all keys of the request (encoders, cross attention). `softcap` c: score = c *
    tanh(score / c), before the bias. `sinks [H]`: a logit per head that only joins the softmax's
    denominator (gpt_oss). Precision: splits of 256 keys at fixed indices, each with its own fp32
    (m, l, acc), merged left to right (Dao et al. 2022; Milakov and Gimelshein 2018).
    """

    q: Value
    out: Value
    group: str
    layer: int
    num_heads: int
    scale: float
    mask: MaskKind = "causal"
    window: int | None = None
    softcap: float | None = None
    sinks: Weight | None = None
    bias: T5Bias | AlibiBias | NearBias | PositionBuckets | None = None
    of_queries: Value | None = None
    """Products of queries with a position table, `[T, H * num_buckets]`, for PositionBuckets."""
    of_keys: Value | None = None
    """Products of keys with a second position table, `[T, H * num_buckets]`, for
    PositionBuckets.
    """
    sees_ahead: bool = False
    """Whether rows may attend to later keys, up to the step's `limits`, as rows of an image do."""
    latent_width: int = 0
    """Columns of a latent group's K that also serve as V; 0: the group stores V."""
    partial_q: Value | None = None
    """Query columns `[T, H * part]` for `selection`, available before q."""
    selection: KeySelection | None = None
    """Selection of the keys that sparse rows read; None: all. Set by the pass `select_keys`."""


@dataclass(frozen=True, slots=True)
class HeadLinear(Op):
    """Matmul of each head: out[t, h] = W[h] x[t, h], followed by the columns tail[t, h].

    `weight` stacks the rows of all heads' matrices, or of W[h]^T if `transposed`. `x [T, H * in]`,
    `tail [T, H * n]`, `out [T, H * (out + n)]`.
    """

    x: Value
    out: Value
    weight: Weight
    num_heads: int
    transposed: bool = False
    tail: Value | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, and outputs and inputs per head."""
        rows, columns = self.weight.shape[0] // self.num_heads, self.weight.shape[1]
        return (self.num_heads, *((columns, rows) if self.transposed else (rows, columns)))


@dataclass(frozen=True, slots=True)
class MlaAttention(Op):
    """Multi-head latent attention (DeepSeek-V2, section 2.1) with cache rows [c (latent_width) |
    k_rope (rope_width)].

    `q_nope [T, H * nope_width]`, `q_rope [T, H * rope_width]`, `kv_b [H * (nope_width + v_width),
    latent_width]` with rows W_UK then W_UV per head; `out [T, H * v_width]`. score = scale *
    (q_nope . (W_UK c) + q_rope . k_rope); value = W_UV c. `form`: absorbed (W_UK folded into q,
    W_UV applied afterwards) or expanded; the model determines it, independently of T.
    """

    q_nope: Value
    q_rope: Value
    out: Value
    kv_b: Weight
    group: str
    layer: int
    num_heads: int
    nope_width: int
    rope_width: int
    latent_width: int
    v_width: int
    scale: float
    form: Literal["absorbed", "expanded"] = "absorbed"


# -- rows selected -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GatherRows(Op):
    """Selects the sampled rows: out[s] = x[sample_rows[s]]."""

    x: Value
    out: Value


@dataclass(frozen=True, slots=True)
class PoolRows(Op):
    """Reduces each request's rows to one: the last, the first, or the mean."""

    x: Value
    out: Value
    mode: Literal["last", "cls", "mean"]


@dataclass(frozen=True, slots=True)
class ScatterRows(Op):
    """Replaces rows by external ones (`StepBatch.input_rows`), e.g. of an image: out[t] =
    input_rows[input_row_indices[t], :W] if that index is not negative, else base[t], or zero
    without base.
    """

    out: Value
    base: Value | None = None


@dataclass(frozen=True, slots=True)
class PrefetchNeurons(Op):
    """Prefetches the weights of a later feed-forward layer's neurons with non-negative scores `[T,
    width]`.

    No outputs. Added by the pass `predict`.
    """

    scores: Value
    gate: str
    """First matrix that computes that layer's gate."""


def num_position_axes(program: Program) -> int:
    """Returns the number of position axes that a Program reads."""
    axes = [0]
    for op in program.ops:
        if isinstance(op, Embedding):
            axes.append(op.axis)
        elif isinstance(op, Rope):
            axes += op.table.axes
    return 1 + max(axes)


def original_context(program: Program) -> OriginalContext:
    """Returns the context length up to which RoPE angles are the original ones."""
    starts = [op.table.long.start for op in program.ops if isinstance(op, Rope) and op.table.long]
    return OriginalContext(min(starts)) if starts else ONE_CONTEXT
