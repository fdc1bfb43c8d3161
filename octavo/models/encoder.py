"""Common parts of BERT-like encoders: post-norm layers with full attention, and the pooling head.

A family names its modules and calls `build_encoder`. The head follows the checkpoint: an embedding
as configured in `1_Pooling` (passed by the loader as `pooling`), or a sequence classifier's scores.
Devlin et al. 2019; Reimers and Gurevych 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.pooled_row import embed_rows
from octavo.models.pooling import is_classifier, num_labels
from octavo.program.builder import Builder
from octavo.program.ops import Activation, PositionBuckets, RopeTable, T5Bias
from octavo.program.program import CacheGroup, Program, Value

Classifier = Callable[[Builder, Value, int], Value]
"""Appends a classifier: takes the last layer's rows and the number of labels, returns a row of
scores per request."""


class PositionScorer(Protocol):
    """Relative position scores: appends products of a layer's queries and keys with position
    tables.
    """

    @property
    def buckets(self) -> PositionBuckets: ...

    @property
    def num_kinds(self) -> int:
        """Number of dot products that are added for a score; the scale of scores depends on it."""
        ...

    def __call__(self, b: Builder, q: Value, k: Value, layer: str) -> tuple[Value, Value]: ...


class TokenConvolution(Protocol):
    """Appends a convolution over tokens, which follows the first layer."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of its own."""
        ...

    def __call__(self, b: Builder, embedded: Value, x: Value) -> Value: ...


Mlp = Callable[[Builder, Value, str], Value]
"""Appends the MLP of the named layer."""


@dataclass(frozen=True, slots=True)
class EncoderShape:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    embedding_size: int = 0
    """Columns of the embeddings, which a module projects to `hidden_size`; 0: `hidden_size`."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @staticmethod
    def read(config: HfConfig, *, norm_eps: float = 1e-12) -> EncoderShape:
        config.without_effect("tie_word_embeddings")  # they belong to the masked-token head
        config.without_effect("directionality", "pooler_fc_size", "pooler_num_attention_heads")
        config.without_effect("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type")
        config.refuse_unless("is_decoder", False)
        config.refuse_unless("add_cross_attention", False)
        config.refuse_unless("position_embedding_type", "absolute")
        hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
        if hidden_size % num_heads:
            raise UnsupportedModel(
                f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads"
                f" {num_heads}"
            )
        return EncoderShape(
            vocab_size=config.integer("vocab_size", low=1),
            hidden_size=hidden_size,
            num_layers=config.count("num_hidden_layers"),
            num_heads=num_heads,
            norm_eps=config.number("layer_norm_eps", norm_eps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Module names of an encoder; layer modules are relative to `layers.N`."""

    prefix: str
    """Prefix of all modules except the head: "", or the base model's name and a dot."""
    layers: str = "encoder.layer"
    shared_layers: tuple[str, ...] = ()
    """Module of each layer, if several layers share one; (): `layers.N`."""
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    stacked: str | None = None
    """Single module with the rows of q, k and v, instead of three."""
    attention_out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    mlp_norm: str = "output.LayerNorm"
    embedding_norm: str = "embeddings.LayerNorm"
    projection: str = "embeddings_project"
    """Module that projects embeddings of `embedding_size`."""

    def layer(self, index: int) -> str:
        """Returns the name of a layer's module."""
        name = self.shared_layers[index] if self.shared_layers else f"{self.layers}.{index}"
        return f"{self.prefix}{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Encoding of positions and segments."""

    offset: int | None = 0
    """Table row of position 0; None: no table."""
    num_rows: int = 0
    num_segments: int = 0
    """Rows of the segment table, indexed by the second position axis; 0: none."""
    rope: RopeTable | None = None
    bias: T5Bias | None = None
    position_scores: PositionScorer | None = None


def base_prefix(config: HfConfig, name: str) -> str:
    """Returns the tensor prefix of the base model; "" if it was saved alone."""
    return "" if config.architecture.endswith("Model") else f"{name}."


def build_encoder(
    config: HfConfig,
    shape: EncoderShape,
    *,
    names: EncoderNames,
    positions: Positions,
    mlp: Mlp,
    classifier: Classifier,
    bias: bool = True,
    convolution: TokenConvolution | None = None,
) -> dict[str, Program]:
    """Builds the encoder: x = norm(embeddings); per layer x = norm(x + attention(x)), x = norm(x +
    mlp(x)); then the head.

    `bias`: whether attention modules have biases.
    """
    heads = (shape.num_heads, shape.head_dim, shape.head_dim)
    position_scores = positions.position_scores
    num_kinds = 1 if position_scores is None else position_scores.num_kinds
    group = CacheGroup("encoder", "full", shape.num_layers, *heads, one_step=True)
    others = () if convolution is None else convolution.groups
    b = Builder("encoder", (group, *others), shape.vocab_size)
    x = embeddings(b, shape, f"{names.prefix}embeddings", positions)
    x = b.layer_norm(x, f"{names.prefix}{names.embedding_norm}", shape.norm_eps)
    if shape.embedding_size:
        x = b.linear(x, f"{names.prefix}{names.projection}", shape.hidden_size, bias=True)
    embedded = x
    for i in range(shape.num_layers):
        layer = names.layer(i)

        def norm(rows: Value, name: str, layer: str = layer) -> Value:
            return b.layer_norm(rows, f"{layer}.{name}", shape.norm_eps)

        q, k, v = _qkv(b, x, layer, names, bias=bias)
        if positions.rope is not None:
            q = b.rope(q, shape.num_heads, positions.rope)
            k = b.rope(k, shape.num_heads, positions.rope)
        b.kv_write("encoder", i, (k,), v)
        attended = b.attention(
            q,
            "encoder",
            i,
            num_heads=shape.num_heads,
            scale=(shape.head_dim * num_kinds) ** -0.5,
            mask="full",
            bias=positions.bias if position_scores is None else position_scores.buckets,
            position_scores=None if position_scores is None else position_scores(b, q, k, layer),
        )
        h = b.linear(attended, f"{layer}.{names.attention_out}", shape.hidden_size, bias=bias)
        x = norm(b.add(h, x), names.attention_norm)
        x = norm(b.add(mlp(b, x, layer), x), names.mlp_norm)
        if convolution is not None and i == 0:
            x = convolution(b, embedded, x)
    if is_classifier(config):
        return {"encoder": b.finish(pooled=classifier(b, x, num_labels(config)))}
    return {"encoder": b.finish(pooled=embed_rows(b, x, config))}


def embeddings(b: Builder, shape: EncoderShape, module: str, positions: Positions) -> Value:
    """Appends the sum of token, segment and position embeddings."""
    width = shape.embedding_size or shape.hidden_size
    x = b.embedding(b.token_ids(), f"{module}.word_embeddings", shape.vocab_size, width)
    if positions.num_segments:
        name, num = f"{module}.token_type_embeddings", positions.num_segments
        x = b.add(x, b.position_embedding(name, num, width, axis=1))
    if positions.offset is not None:
        name, num = f"{module}.position_embeddings", positions.num_rows
        at = b.position_embedding(name, num, width, offset=positions.offset)
        x = b.add(x, at)
    return x


def _qkv(
    b: Builder, x: Value, layer: str, names: EncoderNames, *, bias: bool
) -> tuple[Value, Value, Value]:
    width = x.width
    if names.stacked is None:
        modules = (names.query, names.key, names.value)
        q, k, v = (b.linear(x, f"{layer}.{name}", width, bias=bias) for name in modules)
    else:
        q, k, v = (
            linear_part(b, x, f"{layer}.{names.stacked}", Rows(width, 3 * width, start), bias=bias)
            for start in (0, width, 2 * width)
        )
    return q, k, v


def bert_mlp(config: HfConfig) -> Mlp:
    """Returns BERT's MLP, output(f(intermediate(x)))."""
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "gelu")

    def mlp(b: Builder, x: Value, layer: str) -> Value:
        inner = b.act(b.linear(x, f"{layer}.intermediate.dense", width, bias=True), activation)
        return b.linear(inner, f"{layer}.output.dense", x.width, bias=True)

    return mlp


def bert_classifier(pooler: str) -> Classifier:
    """Returns BERT's classifier: the named pooler and tanh on the first row, then `classifier`."""

    def classifier(b: Builder, x: Value, num: int) -> Value:
        pooled = b.linear(b.pool_rows(x, "cls"), pooler, x.width, bias=True)
        return b.linear(b.act(pooled, "tanh"), "classifier", num, bias=True)

    return classifier


def roberta_classifier(b: Builder, x: Value, num: int, *, activation: Activation = "tanh") -> Value:
    """Appends RoBERTa's classifier: dense, tanh and out_proj on the first row."""
    dense = b.linear(b.pool_rows(x, "cls"), "classifier.dense", x.width, bias=True)
    return b.linear(b.act(dense, activation), "classifier.out_proj", num, bias=True)
