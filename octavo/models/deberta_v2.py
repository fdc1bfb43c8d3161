"""DeBERTa v2 and v3: BERT with disentangled attention, in which scores also depend on relative
positions through projected position tables. He et al. 2021.

v2's convolution over three tokens is computed as attention whose weights are 1 for the neighbour
and 0 for all other keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    bert_mlp,
    build_encoder,
)
from octavo.models.hf_config import MAX_SIZE, HfConfig
from octavo.program.builder import Builder
from octavo.program.family_ops import PositionScores
from octavo.program.ops import Activation, PositionBuckets, PreNorm, T5Bias
from octavo.program.program import TAPS, CacheGroup, Impulse, Program, Value, Weight

NUM_BUCKETS = 32
"""Buckets of relative positions; those of neighbours contain one position each."""
KEY_WIDTH = 8
"""Width of keys that are all zeros."""
FAR = -10_000.0
"""Score of keys that are not read: exp(FAR / 2) is 0."""
SELF = "attention.self"
BOTH = {"c2p", "p2c"}


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("conv_kernel_size", 0, TAPS)
    config.without_effect("conv_act", "conv_groups", "legacy", "pooler_dropout")
    config.without_effect("pooler_hidden_act", "pooler_hidden_size")  # except for a classifier
    shape = EncoderShape.read(config, norm_eps=1e-7)
    config.refuse_unless("embedding_size", shape.hidden_size)
    config.refuse_unless("attention_head_size", shape.head_dim)
    prefix = base_prefix(config, "deberta")
    max_places = config.size("max_position_embeddings", 512)
    has_table = config.flag("position_biased_input", True)
    return build_encoder(
        config,
        shape,
        names=EncoderNames(
            prefix=prefix,
            query=f"{SELF}.query_proj",
            key=f"{SELF}.key_proj",
            value=f"{SELF}.value_proj",
        ),
        positions=Positions(
            offset=0 if has_table else None,
            num_rows=max_places,
            num_segments=config.integer("type_vocab_size", 0),
            position_scores=_read_position_scores(config, shape, prefix, max_places),
        ),
        mlp=bert_mlp(config),
        classifier=lambda b, x, num: _classifier(b, x, num, config),
        convolution=_read_convolution(config, shape, f"{prefix}encoder.conv"),
    )


def _read_convolution(
    config: HfConfig, shape: EncoderShape, module: str
) -> NeighbourConvolution | None:
    """Reads the convolution after the first layer; None if the config has none."""
    if not config.integer("conv_kernel_size", 0):
        return None
    config.refuse_unless("conv_groups", 1)
    is_tanh = config.text("conv_act", "tanh") == "tanh"
    return NeighbourConvolution(
        shape, module, "tanh" if is_tanh else config.activation("conv_act", "gelu")
    )


@dataclass(frozen=True, slots=True)
class NeighbourConvolution:
    """A convolution over three tokens and its norm; tokens beyond the text are zeros."""

    shape: EncoderShape
    module: str
    activation: Activation

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        heads = (self.shape.num_heads, KEY_WIDTH, self.shape.head_dim)
        return (CacheGroup("neighbours", "full", 1, *heads, one_step=True),)

    def __call__(self, b: Builder, embedded: Value, x: Value) -> Value:
        width, key_width = embedded.width, self.shape.num_heads * KEY_WIDTH
        none = Weight(f"{self.module}.zeros", (key_width, width), fill=0.0)
        zeros = b.linear_from(embedded, none, name="zeros")
        b.kv_write("neighbours", 0, (zeros,), embedded)
        out: Value | None = None
        before, after = (self._neighbour(b, zeros, distance) for distance in (-1, 1))
        for tap, row in enumerate((before, embedded, after)):
            weight = Weight(
                f"{self.module}.conv.{tap}",
                (width, width),
                (f"{self.module}.conv.weight",),
                stored_as="tap",
                tap=tap,
            )
            bias = Weight(f"{self.module}.conv.bias", (width,)) if tap == 0 else None
            part = b.linear_from(row, weight, bias, name="convolved")
            out = part if out is None else b.add(out, part)
        assert out is not None, "a convolution has taps"
        summed = b.add(x, b.act(out, self.activation))
        return b.layer_norm(summed, f"{self.module}.LayerNorm", self.shape.norm_eps)

    def _neighbour(self, b: Builder, zeros: Value, distance: int) -> Value:
        """Appends the embedding of the token before (-1) or after (1) each one. Scores are 0 for
        its key and `FAR` for others; a sink between them gives zeros where there is no key.
        """
        num_heads = self.shape.num_heads
        bucket = NUM_BUCKETS // 2 + 1 if distance > 0 else 1
        fill = Impulse(bucket, FAR)
        table = Weight(f"{self.module}.{distance}", (NUM_BUCKETS, num_heads), fill=fill)
        return b.attention(
            zeros,
            "neighbours",
            0,
            num_heads=num_heads,
            scale=1.0,
            mask="full",
            sinks=Weight(f"{self.module}.sinks", (num_heads,), fill=FAR / 2),
            bias=T5Bias(table, NUM_BUCKETS, max_distance=NUM_BUCKETS, bidirectional=True),
        )


def _read_position_scores(
    config: HfConfig, shape: EncoderShape, prefix: str, max_places: int
) -> DisentangledScores | None:
    """Reads the relative position scores; None if the config has none."""
    kinds = config.values.get("pos_att_type") or []
    listed = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    named = {str(kind).strip() for kind in listed} if isinstance(listed, list) else {"?"}
    relative = config.flag("relative_attention", False)
    farthest = config.integer("max_relative_positions", -1, low=-1, high=MAX_SIZE)
    num_buckets = config.integer("position_buckets", -1, low=-1, high=MAX_SIZE)
    norms = {name.strip() for name in config.text("norm_rel_ebd", "none").lower().split("|")}
    is_shared = config.flag("share_att_key", False)
    if named != (BOTH if relative else set()):
        raise UnsupportedModel(
            f"config.json: pos_att_type is {kinds!r} with relative_attention {relative},"
            " supported: c2p and p2c with relative_attention, none without"
        )
    if not relative:
        return None
    farthest = farthest if farthest > 0 else max_places
    half = num_buckets if num_buckets > 0 else farthest
    if num_buckets > 0 and not 2 <= num_buckets // 2 < farthest - 1:
        raise UnsupportedModel(
            f"config.json: position_buckets is {num_buckets}, expected a number of at least 4,"
            f" less than twice max_relative_positions - 1 ({farthest})"
        )
    return DisentangledScores(
        shape=shape,
        prefix=f"{prefix}encoder",
        buckets=PositionBuckets(2 * half, farthest if num_buckets > 0 else None, max_places),
        is_normed="layer_norm" in norms,
        is_shared=is_shared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledScores:
    """Relative position scores: queries and keys times the position table, projected per layer or
    by the shared key and query projections.
    """

    shape: EncoderShape
    prefix: str
    buckets: PositionBuckets
    is_normed: bool
    is_shared: bool

    @property
    def num_kinds(self) -> int:
        """Number of products that are summed for a score."""
        return 1 + len(BOTH)

    def __call__(self, b: Builder, q: Value, k: Value, layer: str) -> tuple[Value, Value]:
        width, eps = self.shape.hidden_size, self.shape.norm_eps
        table = Weight(f"{self.prefix}.rel_embeddings.weight", (self.buckets.num_buckets, width))
        weight, bias = (
            Weight(f"{self.prefix}.LayerNorm.{name}", (width,)) for name in ("weight", "bias")
        )
        norm = PreNorm(weight, eps, bias, centered=True) if self.is_normed else None
        names = ("key_proj", "query_proj") if self.is_shared else ("pos_key_proj", "pos_query_proj")
        of_queries, of_keys = (
            add_position_scores(
                b, x, table, f"{layer}.{SELF}.{name}", num_heads=self.shape.num_heads, norm=norm
            )
            for x, name in zip((q, k), names, strict=True)
        )
        return of_queries, of_keys


def _classifier(b: Builder, x: Value, num: int, config: HfConfig) -> Value:
    """Appends the pooler of the first row and the classifier."""
    config.refuse_unless("pooler_hidden_size", x.width)
    dense = b.linear(b.pool_rows(x, "cls"), "pooler.dense", x.width, bias=True)
    pooled = b.act(dense, config.activation("pooler_hidden_act", "gelu"))
    return b.linear(pooled, "classifier", num, bias=True)


def add_position_scores(
    b: Builder, x: Value, table: Weight, module: str, *, num_heads: int, norm: PreNorm | None
) -> Value:
    """Appends products of each head with a projected position table."""
    out = b.value(f"{module}.position_scores", x.axis, num_heads * table.shape[0])
    weight = Weight(f"{module}.weight", (x.width, table.shape[1]))
    bias = Weight(f"{module}.bias", (x.width,))
    b.append(PositionScores(x, out, table, weight, bias=bias, num_heads=num_heads, norm=norm))
    return out
