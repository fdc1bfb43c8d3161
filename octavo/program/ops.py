"""The kinds of op a Program is made of: for each its shapes, its formula and its source. Those that
mix rows without attention stand in `mixers.py`, those of experts in `expert_ops.py`, those between
ranks in `rank_ops.py`, and those of a single family in `family_ops.py`.

Shapes use one alphabet: `T` rows, `W` width, `H` query heads, `K` kv heads, `D` head size, `E`
experts, `k` experts a token, `V` vocabulary. Attributes are plain numbers and strings, so that
passes and backends can compare and hash ops. Places, positions, slots and block tables are not
Values: every op that needs them reads the step's batch (`executor/batch.py`). A row's place is its
index among its request's keys, by which attention masks and biases; its positions are what rope and
learned embeddings read, and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.program.key_selection import KeySelection
from octavo.program.program import Op, Program, Value, Weight

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh"]
MaskKind = Literal["causal", "full", "window", "chunk", "tree"]


@dataclass(frozen=True, slots=True)
class LongAngles:
    """Angles of requests that are longer than the original context and that begin at `start`
    (`octavo/engine/protocol/original_context.py`): a token at position p is rotated by the angle
    of p - start.
    """

    start: int
    inv_freq: tuple[float, ...]
    mscale: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Table of a rope: inverse frequencies, and the factor on cos and sin."""

    inv_freq: tuple[float, ...]
    """Inverse frequencies, radians a position; `rotary_dim / 2` of them."""
    mscale: float = 1.0
    """Factor on cos and sin (YaRN's)."""
    axes: tuple[int, ...] = ()
    """Axis of the positions that each frequency turns by (M-RoPE, Wang et al. 2024); (): the first
    one for all."""
    long: LongAngles | None = None
    """Angles of the positions from `long.start` on (LongRoPE, Ding et al. 2024); None: these."""


@dataclass(frozen=True, slots=True)
class T5Bias:
    """T5's relative position bias: a table looked up by the bucket of key place - query place.

    Raffel et al. 2020, section 2.1; the logarithmic buckets are those of its reference code.
    """

    table: Weight
    """Bias of each bucket and query head, `[num_buckets, H]`."""
    num_buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class AlibiBias:
    """ALiBi: score += slope[h] * (key place - query place) (Press et al. 2022)."""

    slopes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NearBias:
    """A window to both sides: score += FAR for keys more than `reach` places from the query, whose
    share of the sum is then 0 to the last bit (ModernBERT's local layers).
    """

    reach: int


@dataclass(frozen=True, slots=True)
class PlaceBuckets:
    """Disentangled attention's scores by places: score += scale * (of_queries[t, h, b] +
    of_keys[j, h, b]), where b is the bucket of the query's place t less the key's, j.

    `num_buckets` of them, half to each side: distances up to a quarter each have their own, those
    beyond share them on a logarithmic scale up to `max_distance`; without `max_distance` each has
    its own up to the last. Texts have at most `max_places` tokens, all in one step. He et al. 2021,
    section 3.1; the logarithmic buckets are those of its reference code.
    """

    num_buckets: int
    max_distance: int | None
    max_places: int


FAR = -1e30
"""Number added to the scores of keys that a query does not see. It is finite, since all keys of a
split may be far, and the splits are merged by differences of their largest scores."""


# -- rows in, rows out -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    """Rows of a table: out[t] = table[ids[t]] * scale.

    With `by_position` the ids are the positions on the step's axis `axis` plus `offset` (GPT-2,
    OPT; BERT's segments are its second axis). With `first_row` the table is one rank's part of the
    vocabulary's, from that row on; an id outside of it gives zeros.
    """

    out: Value
    table: Weight
    """Table `[V, W]`."""
    ids: Value | None = None
    scale: float = 1.0
    by_position: bool = False
    offset: int = 0
    first_row: int | None = None
    axis: int = 0
    site: str = ""
    """Module that an adapter may update; empty: none. Set by the adapters pass."""
    others_first: bool = False
    """Whether ids behind the table read its first row (Gemma 3n's tables by layer)."""


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """Root mean square norm: y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over groups
    of `group_width` columns.

    `x [T, W]`, `weight [group_width]`, the same for all groups, or `[W]`. Head norms (Qwen3, Gemma
    3) have `group_width = D`. Zhang and Sennrich 2019.
    """

    x: Value
    out: Value
    weight: Weight
    eps: float
    weight_offset: float = 0.0
    group_width: int = 0
    """Columns that are normed together; 0: the whole row."""


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """Layer norm: y = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, where `var`
    is the biased variance, over groups of `group_width` columns.

    `weight [group_width]` and `bias` alike, the same for all groups, or `weight [W]` without a
    bias. Ba et al. 2016.
    """

    x: Value
    out: Value
    weight: Weight
    bias: Weight | None
    eps: float
    weight_offset: float = 0.0
    group_width: int = 0
    """Columns that are normed together; 0: the whole row."""


@dataclass(frozen=True, slots=True)
class PreNorm:
    """Norm that a Linear applies to its rows first: RmsNorm or, with `centered`, LayerNorm. Made by
    the fuse pass.
    """

    weight: Weight
    eps: float
    bias: Weight | None = None
    weight_offset: float = 0.0
    centered: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """Gate that a Linear applies to its two products, with ActMul's attributes. Made by the fuse
    pass.
    """

    activation: Activation
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """Product with one or several matrices: [outs...] = x @ concat(weights)^T + concat(biases),
    then the activation where one is set.

    `x [T, in]`; `weights_` are stacked on their output axis, in order; `outs` cut the result's
    columns in order. Their widths sum to the weights' rows, but need not match one to one, so a
    merged q+k+v keeps its named slices.
    """

    x: Value
    outs: tuple[Value, ...]
    weights_: tuple[Weight, ...]
    biases: tuple[Weight | None, ...] = ()
    """Biases, empty or one for each weight; None for a weight without one."""
    activation: Activation | None = None
    residual: Value | None = None
    """Rows `[T, out]` added last; the Linear has one out."""
    norm: PreNorm | None = None
    """Norm applied to x first; models leave it to the fuse pass."""
    gate: Gate | None = None
    """Gate of two weights (gate, up) of one shape, which makes the one out ActMul(x @ gate^T, x @
    up^T); models leave it to the fuse pass."""
    sites: tuple[str, ...] = ()
    """Modules of `weights_`, which an adapter may update; empty: none. Set by the adapters pass."""
    skips_zeros: bool = False
    """Whether most numbers of x are zeros, so that weights need not be read. Set by the passes
    `skip_zeros` and `sparsify`; no result depends on it."""
    threshold: float = 0.0
    """Magnitude below which the products take a number of x, after the norm, for zero, in rows that
    are sparse (`StepBatch.sparse_from`); adapters take it as it is. Set by the pass `sparsify`."""
    scores: Value | None = None
    """Scores of a gated product's outs, as ActMul's; made by the fuse pass."""


@dataclass(frozen=True, slots=True)
class Add(Op):
    """Sum of two Values of the same shape: out = a + b."""

    a: Value
    b: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Mul(Op):
    """Product element by element: out = a * b; `b` has the width of `a`, or width 1 and is spread
    over the row.
    """

    a: Value
    b: Value
    out: Value


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """Product with a number: out = x * factor."""

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
    """Bound on magnitudes: out = min(max(x, -limit), limit) (OLMo's q, k and v)."""

    x: Value
    out: Value
    limit: float


@dataclass(frozen=True, slots=True)
class Act(Op):
    """Activation, element by element: out = f(x).

    gelu is the exact (erf) form, gelu_tanh the tanh approximation, relu2 = relu squared.
    """

    x: Value
    out: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class ActMul(Op):
    """Gated activation: out = f(gate) * (up + up_offset). Shazeer 2020.

    With `clamp` c: gate = min(gate, c), up = clip(up, -c, c) first. With `alpha`: f(g) = g *
    sigmoid(alpha * g) in place of silu (gpt_oss: clamp 7, alpha 1.702, up_offset 1).
    """

    gate: Value
    up: Value
    out: Value
    activation: Activation
    clamp: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    threshold: float = 0.0
    """Magnitude of f(gate) below which out is zero, in rows that are sparse. Set by the pass
    `sparsify`."""
    scores: Value | None = None
    """Scores `[T, width]` of the columns, known before gate and up are: where one is negative, out
    is zero in rows that are sparse, and neither need be computed. Set by the pass `predict`."""


# -- attention and its cache -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotary positions: turns `rotary_dim` columns of each head from `rotary_start` on by the row's
    position on the first axis.

    `x [T, heads * head_width]`. half: pairs (i, i + rotary_dim/2), GPT-NeoX's and Hugging Face's
    order; interleaved: pairs (2i, 2i+1), GPT-J's. angle = position * table.inv_freq[i]; cos and sin
    are multiplied with table.mscale; positions from table.long.start on have the angles of
    table.long. Su et al. 2021; YaRN: Peng et al. 2023.
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
    """Write of this step's K and V of one layer to the rows' slots of the group; slot -1 stores
    nothing.

    `k_parts` are laid side by side for each head (MLA: latent, then the rotary part), `[T, K *
    width]` each; `v [T, K * v_width]` or None.
    """

    k_parts: tuple[Value, ...]
    v: Value | None
    group: str
    layer: int


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Attention over the keys of the row's request, read from the cache group: out[t, h] =
    softmax(scale * q[t, h] . K + bias) . V.

    `q [T, H * k_width]`, `out [T, H * v_width]`; query head h reads kv head h // (H / K). `layer`
    is the layer within the group whose K and V are read (another layer's where layers share KV).
    mask causal: key place <= query place, or below the row's limit where the step has `limits`;
    window: and > query place - window; chunk: and in the query's own chunk of `window` places
    (Llama 4); full: every key below the request's context length (encoders, cross attention).
    `softcap` c: score = c * tanh(score / c), before the bias. `sinks [H]`: one logit a head that
    joins the softmax's denominator only (gpt_oss). Numbers: splits of 256 keys at absolute places,
    each with its own fp32 (m, l, acc), merged left to right (Dao et al. 2022; Milakov and
    Gimelshein 2018).
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
    bias: T5Bias | AlibiBias | NearBias | PlaceBuckets | None = None
    of_queries: Value | None = None
    """Products of queries with a table of places `[T, H * num_buckets]`, for PlaceBuckets."""
    of_keys: Value | None = None
    """Products of keys with another such table `[T, H * num_buckets]`, for PlaceBuckets."""
    sees_ahead: bool = False
    """Whether rows may see keys beyond their own place, up to the step's `limits`: an image's see
    one another."""
    latent_width: int = 0
    """Columns of a latent group's K that are V too; 0: the group stores V."""
    partial_q: Value | None = None
    """Columns of queries `[T, H * part]` by which `selection` chooses keys, known before q is."""
    selection: KeySelection | None = None
    """Choice of the keys that sparse rows read; None: all. Set by the pass `select_keys`."""


@dataclass(frozen=True, slots=True)
class HeadLinear(Op):
    """Product of each head's columns with a matrix of its own: out[t, h] = W[h] x[t, h], and behind
    it the columns tail[t, h].

    `weight` has the rows of all heads' matrices; with `transposed` these are W[h]^T. `x [T, H *
    in]`, `tail [T, H * n]`, `out [T, H * (out + n)]`. Made by the pass `absorb_latents`.
    """

    x: Value
    out: Value
    weight: Weight
    num_heads: int
    transposed: bool = False
    tail: Value | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, outputs and inputs of a head."""
        rows, columns = self.weight.shape[0] // self.num_heads, self.weight.shape[1]
        return (self.num_heads, *((columns, rows) if self.transposed else (rows, columns)))


@dataclass(frozen=True, slots=True)
class MlaAttention(Op):
    """Attention over a latent group (DeepSeek-V2, section 2.1), whose cache row is [c
    (latent_width) | k_rope (rope_width)].

    `q_nope [T, H * nope_width]`, `q_rope [T, H * rope_width]`, `kv_b [H * (nope_width + v_width),
    latent_width]`, whose rows for each head are W_UK then W_UV; `out [T, H * v_width]`. score =
    scale * (q_nope . (W_UK c) + q_rope . k_rope); value = W_UV c. `form` says how it is computed:
    absorbed (W_UK folded into q, W_UV applied after) or expanded; the model decides, never T.
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


# -- rows chosen, tokens drawn ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GatherRows(Op):
    """Choice of the sampled rows, from the axis tokens to samples: out[s] = x[sample_rows[s]]."""

    x: Value
    out: Value


@dataclass(frozen=True, slots=True)
class PoolRows(Op):
    """One row for each request, made of its rows: the last, the first, or their mean."""

    x: Value
    out: Value
    mode: Literal["last", "cls", "mean"]


@dataclass(frozen=True, slots=True)
class ScatterRows(Op):
    """Rows from outside (`StepBatch.given`) in the place of others, as an image's stand in for its
    tokens': out[t] = given[given_rows[t]] where that index is not negative, else base[t]; zeros
    where there is no base.
    """

    out: Value
    base: Value | None = None


@dataclass(frozen=True, slots=True)
class Foresee(Op):
    """Guess of the neurons that a feed-forward layer further on will use, those whose scores `[T,
    width]` are not negative, so that their weights may be read early. Makes nothing. Set by the
    pass `predict`.
    """

    scores: Value
    gate: str
    """Name of the first matrix that makes that layer's gate."""


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
    """Returns the context up to which a Program's angles are its original ones."""
    starts = [op.table.long.start for op in program.ops if isinstance(op, Rope) and op.table.long]
    return OriginalContext(min(starts)) if starts else ONE_CONTEXT
