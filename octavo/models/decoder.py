"""The pre-norm decoder block that most families share, its shape and cache groups.

A family builds its parts and calls `build_decoder`; common attention is in `self_attention.py`,
MLPs in `mlps.py`. Weight names are those of Hugging Face's Llama checkpoints
(`model.layers.N.self_attn.q_proj.weight`). Block: Touvron et al. 2023; GQA: Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.pooled_row import pooled_row
from octavo.models.pooling import PooledHead, pooled_head
from octavo.program.build_family_ops import columns
from octavo.program.builder import Builder
from octavo.program.ops import MaskKind
from octavo.program.program import CacheGroup, Growth, Program, Value, Weight

Sublayer = Callable[[Builder, Value, int], Value]
"""Appends the attention or MLP of layer i; takes normed rows and returns what is added to the
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
    """Pooling head; None for a generating model."""

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
        num_kv_heads: int | None = None,
        norm_eps: float = 1e-6,
        eps_name: str = "rms_norm_eps",
        tied: bool = False,
    ) -> DecoderShape:
        """Reads the shape from a config; keyword arguments are the family's defaults.

        A null head_dim means hidden_size / num_attention_heads, null num_key_value_heads means all
        heads; these are also the defaults of families with None here.
        """
        hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
        kv_heads = config.get_if_missing("num_key_value_heads", num_kv_heads) or num_heads
        num_kv_heads = config.size(
            "num_key_value_heads", num_heads if num_heads % kv_heads else kv_heads
        )
        width = config.get_if_missing("head_dim", head_dim) or hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"config.json: num_attention_heads {num_heads} is not a multiple of"
                f" num_key_value_heads {num_kv_heads}"
            )
        return DecoderShape(
            vocab_size=config.integer("vocab_size", low=1),
            hidden_size=hidden_size,
            num_layers=config.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.size("head_dim", width),
            norm_eps=config.number(eps_name, norm_eps),
            tied=config.ties_head(tied),
            pooled=pooled_head(config),
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Cache group, layer index and mask of each layer's attention."""

    group: str
    layer: int
    mask: MaskKind


@dataclass(frozen=True, slots=True)
class CachePlan:
    groups: tuple[CacheGroup, ...]
    layers: tuple[LayerCache, ...]


def query_growth(max_positions: int, growth: Growth) -> Weight | None:
    """Returns the query scaling table by position; None if no position is scaled."""
    if not growth.slope or max_positions - 1 + growth.shift < growth.floor:
        return None
    return Weight("query_growth", (max_positions, 1), fill=growth)


def plan_cache(
    shape: DecoderShape,
    windows: Sequence[int | None],
    *,
    chunks: bool = False,
    num_shared: int = 0,
) -> CachePlan:
    """Assigns full and sliding-window layers to separate groups; `windows` has an entry per layer.

    With `chunks` the entries are chunk lengths. The last `num_shared` layers read KV of the last
    earlier layer with the same window.
    """
    if num_shared:
        own, shared = windows[:-num_shared], windows[-num_shared:]
        if set(windows) != set(own):
            raise UnsupportedModel(
                f"config.json: num_kv_shared_layers is {num_shared}, which leaves a layer type"
                f" without its own KV cache"
            )
        plan = plan_cache(shape, own, chunks=chunks)
        last = dict(zip(own, plan.layers, strict=True))
        return CachePlan(plan.groups, (*plan.layers, *(last[window] for window in shared)))
    full = [i for i, window in enumerate(windows) if window is None]
    sliding = [i for i, window in enumerate(windows) if window is not None]
    heads = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
    groups = [CacheGroup("full", "full", len(full), *heads)] if full else []
    if sliding:
        groups.append(
            CacheGroup("window", "window", len(sliding), *heads, window=windows[sliding[0]])
        )
    layers = {i: LayerCache("full", n, "causal") for n, i in enumerate(full)}
    mask: MaskKind = "chunk" if chunks else "window"
    layers |= {i: LayerCache("window", n, mask) for n, i in enumerate(sliding)}
    return CachePlan(tuple(groups), tuple(layers[i] for i in range(len(windows))))


Norm = Callable[[Builder, Value, str], Value]
"""Appends a norm with the given module name."""


def rms_norm(eps: float, *, offset: float = 0.0) -> Norm:
    """Returns an RMS norm; `offset` is added to its weight (Gemma)."""
    return lambda b, x, name: b.rms_norm(x, name, eps, weight_offset=offset)


def layer_norm(eps: float, *, bias: bool = True, weight: bool = True, offset: float = 0.0) -> Norm:
    """Returns a LayerNorm; without `weight` the weight is 1; `offset` is added to it (Nemotron)."""
    return lambda b, x, name: b.layer_norm(
        x, name, eps, bias=bias, has_weight=weight, weight_offset=offset
    )


@dataclass(frozen=True, slots=True)
class NormNames:
    """Module names of a layer's norms; None for absent ones."""

    before_attention: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    """Norm before the MLP; None if it reads the attention's input (parallel block)."""
    after_attention: str | None = None
    after_mlp: str | None = None


AFTER_ONLY = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
"""Post-norm only (OLMo 2, EXAONE 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything around attention and MLP: module names, norms, residuals and scaling factors."""

    norms: NormNames = NormNames()
    norm: Norm | None = None
    """Norm constructor; None: RMS norm."""
    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str | None = "model.norm"
    head: str = "lm_head"
    head_bias: bool = False
    positions: Callable[[Builder], Value] | None = None
    """Appends learned position embeddings, which are added to token embeddings."""
    embedding_norm: str | None = None
    projected_width: int | None = None
    """Embedding width if `projections` map embeddings to the hidden size and back (OPT-350m)."""
    projections: tuple[str, str] = ("project_in", "project_out")
    norms_sums: bool = False
    """Whether norms are applied after residual sums, x = norm(x + sublayer(x)), under the names of
    the pre-norms (OPT-350m)."""
    parallel: bool = False
    """Whether attention and MLP both read the layer's input: x += attention(..) + mlp(..)."""
    embedding_scale: float = 1.0
    takes_rows: bool = False
    """Whether external rows (images) may replace embeddings."""
    deep_rows: int = 0
    """Number of first layers after which further columns of the external rows are added
    (DeepStack, Meng et al. 2024)."""
    residual_scale: float = 1.0
    """Factor on sublayer outputs (Granite)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None


PLAIN = Frame()
"""Llama's frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionLayer:
    """A multi-token-prediction layer after a family's last one: x = projection(norm(embedding),
    norm(hidden state)), then a layer of the family.
    """

    shape: DecoderShape
    """Shape of the model."""
    group: CacheGroup
    """Cache group of this layer."""
    attention: Sublayer
    mlp: Sublayer
    module: str
    """Module of the layer's own tensors."""
    layer: str
    """Module of the norms of the family's layer."""
    number: int
    """Number that `attention` and `mlp` take."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    head: str = "shared_head.head"
    norm: Norm | None = None
    """Norm constructor; None: RMS norm."""
    returns_normed: bool = False
    """Whether the next draft token reads the layer's output after `final_norm`."""

    @staticmethod
    def behind_last(
        shape: DecoderShape, group: CacheGroup, attention: Sublayer, mlp: Sublayer
    ) -> PredictionLayer:
        """Returns a layer that is stored as the one after the last (DeepSeek)."""
        module = f"model.layers.{shape.num_layers}"
        return PredictionLayer(
            shape=shape,
            group=group,
            attention=attention,
            mlp=mlp,
            module=module,
            layer=module,
            number=shape.num_layers,
        )


def build_decoder(
    shape: DecoderShape,
    groups: tuple[CacheGroup, ...],
    attention: Sublayer,
    mlp: Sublayer | None,
    frame: Frame = PLAIN,
) -> dict[str, Program]:
    """Builds the decoder: x = embedding; per layer x += attention(norm(x)), x += mlp(norm(x));
    logits = head(norm(sampled rows of x)).

    Without `mlp` a layer has one sublayer. A pooling model returns one row per request instead.
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
        if i < frame.deep_rows:
            first = (i + 1) * shape.hidden_size
            given = b.input_rows(first + shape.hidden_size)
            x = b.add(x, columns(b, given, first, shape.hidden_size))
    return finish_decoder(b, x, shape, frame)


def finish_decoder(b: Builder, x: Value, shape: DecoderShape, frame: Frame) -> dict[str, Program]:
    """Appends the end of a decoder: logits of sampled rows, or one pooled row per request."""
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
    logits = b.linear_from(
        x,
        Weight(f"{matrix}.weight", (shape.vocab_size, x.width)),
        Weight(f"{frame.head}.bias", (shape.vocab_size,)) if frame.head_bias else None,
        name=matrix,
    )
    logits = b.softcap(b.scale(logits, frame.logit_scale), frame.logit_softcap)
    return {"decoder": b.finish(logits=logits)}


@dataclass(frozen=True, slots=True)
class _Layers:
    """Appends the layers of a decoder."""

    attention: Sublayer
    mlp: Sublayer | None
    frame: Frame
    norm: Callable[[Value, str | None], Value]

    def __call__(self, b: Builder, x: Value, i: int) -> Value:
        """Appends layer i and returns the residual stream after it."""
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
