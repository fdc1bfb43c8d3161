"""BART-like encoder-decoders. Families differ only in norms and positions (`Seq2SeqStyle`).

The encoder processes the complete input at once and stores each decoder layer's cross K and V in
the group "cross". Lewis et al. 2020; Vaswani et al. 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.program.builder import Builder
from octavo.program.ops import Activation, MaskKind
from octavo.program.program import CacheGroup, Program, Selection, Sinusoids, Value, Weight

EPS = 1e-5
"""Epsilon of every LayerNorm; not in the configs."""

Positions = Callable[[Builder, str], Value]
"""Adds the position embedding of a stack, by module name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    num_layers: int
    num_heads: int
    hidden_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqShape:
    vocab_size: int
    width: int
    encoder: Stack
    decoder: Stack
    activation: Activation
    embedding_scale: float
    num_positions: int
    ties_tables: bool
    """Whether both stacks share one embedding table."""
    ties_head: bool
    """Whether the output layer is the decoder's embedding table."""

    @staticmethod
    def read(config: HfConfig) -> Seq2SeqShape:
        config.without_effect(
            *("encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "hidden_size"),
            *("init_std", "add_final_layer_norm", "normalize_before", "normalize_embedding"),
            *("extra_pos_embeddings", "add_bias_logits", "static_position_embeddings"),
            *("force_bos_token_to_be_generated", "num_attention_heads", "tokenizer_class"),
            *("task_specific_params", "bos_token_id", "classif_dropout", "gradient_checkpointing"),
        )
        width = config.size("d_model")
        encoder, decoder = (
            Stack(
                num_layers=config.count(f"{name}_layers"),
                num_heads=config.size(f"{name}_attention_heads"),
                hidden_width=config.size(f"{name}_ffn_dim"),
            )
            for name in ("encoder", "decoder")
        )
        for stack, name in ((encoder, "encoder"), (decoder, "decoder")):
            if width % stack.num_heads:
                raise UnsupportedModel(
                    f"config.json: d_model is {width}, expected a multiple of"
                    f" {name}_attention_heads ({stack.num_heads})"
                )
        return Seq2SeqShape(
            vocab_size=config.integer("vocab_size", low=1),
            width=width,
            encoder=encoder,
            decoder=decoder,
            activation=config.activation("activation_function", "gelu"),
            embedding_scale=width**0.5 if config.flag("scale_embedding", False) else 1.0,
            num_positions=config.integer("max_position_embeddings", 1024, low=1),
            ties_tables=config.flag("tie_word_embeddings", True),
            ties_head=config.ties_head(True),
        )

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of both Programs, identical, so that both index slots and block tables
        alike.
        """

        def heads(stack: Stack) -> tuple[int, int, int, int]:
            head = self.width // stack.num_heads
            return (stack.num_layers, stack.num_heads, head, head)

        return (
            CacheGroup("encoder", "full", *heads(self.encoder), one_step=True, of_input=True),
            CacheGroup("decoder", "full", *heads(self.decoder)),
            CacheGroup("cross", "cross", *heads(self.decoder)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqStyle:
    """Differences between families."""

    positions: Positions
    norms_first: bool = False
    """Whether sublayers use pre-norm with a final norm per stack; otherwise post-norm."""
    norms_embeddings: bool = False
    table: str = "model.shared"
    """Module of the shared embedding table."""
    head: str = "lm_head"
    """Module of an untied output layer."""
    k_bias: bool = True
    logits_bias: bool = True
    """Whether the checkpoint has a logits bias."""


class HeadTaps:
    """Collects the cross-attention queries or keys of some heads, for alignments of tokens with the
    input.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], head_dim: int) -> None:
        """`heads` are pairs of a decoder layer and a head."""
        self.num_layers = 1 + max(layer for layer, _ in heads)
        self._heads = heads
        self._head_dim = head_dim
        self._sum: Value | None = None

    def add(self, b: Builder, x: Value, layer: int) -> None:
        """Collects the layer's heads of `x [T, W]`."""
        dim = self._head_dim
        columns = tuple(
            head * dim + i if own == layer else -1 for own, head in self._heads for i in range(dim)
        )
        if max(columns) < 0:
            return
        weight = Weight(f"heads.{layer}", (len(columns), x.width), fill=Selection(columns))
        part = b.linear_from(x, weight, name="heads")
        self._sum = part if self._sum is None else b.add(self._sum, part)

    def finish(self, b: Builder) -> Program:
        """Returns the Program whose rows are the heads' columns, in the order of `heads`."""
        assert self._sum is not None, "there is a head"
        return b.finish(rows=b.gather_rows(self._sum))


def build_seq2seq(shape: Seq2SeqShape, style: Seq2SeqStyle) -> dict[str, Program]:
    return {
        "encoder": _build_encoder(shape, style),
        "decoder": build_decoder(shape, style),
    }


def _build_encoder(shape: Seq2SeqShape, style: Seq2SeqStyle) -> Program:
    b = Builder("encoder", shape.groups, shape.vocab_size)
    x = _embedding(b, shape, style, "model.encoder")
    return finish_encoder(b, x, shape, style)


def finish_encoder(
    b: Builder,
    x: Value,
    shape: Seq2SeqShape,
    style: Seq2SeqStyle,
    taps: HeadTaps | None = None,
) -> Program:
    """Appends the encoder's layers and writes the decoder's cross K and V."""
    for i in range(shape.encoder.num_layers):
        layer = f"model.encoder.layers.{i}"
        x = _attend_self(b, x, layer, shape, style, group="encoder", index=i, mask="full")
        x = _feed_forward(b, x, layer, shape, style, width=shape.encoder.hidden_width)
    x = b.layer_norm(x, "model.encoder.layer_norm", EPS) if style.norms_first else x
    for i in range(shape.decoder.num_layers):
        k = _write_kv(b, x, f"model.decoder.layers.{i}.encoder_attn", style, group="cross", index=i)
        if taps is not None:
            taps.add(b, k, i)
    if taps is not None:
        return taps.finish(b)
    return b.finish(encoded=b.pool_rows(x, "last"))


def build_decoder(
    shape: Seq2SeqShape, style: Seq2SeqStyle, taps: HeadTaps | None = None
) -> Program:
    """Builds the decoder; with `taps` only its layers with chosen heads, whose queries it
    returns.
    """
    b = Builder("decoder", shape.groups, shape.vocab_size)
    x = _embedding(b, shape, style, "model.decoder")
    for i in range(shape.decoder.num_layers if taps is None else taps.num_layers):
        layer = f"model.decoder.layers.{i}"
        x = _attend_self(b, x, layer, shape, style, group="decoder", index=i, mask="causal")
        x = _attend_cross(b, x, layer, shape, style, index=i, taps=taps)
        x = _feed_forward(b, x, layer, shape, style, width=shape.decoder.hidden_width)
    if taps is not None:
        return taps.finish(b)
    x = b.gather_rows(x)
    x = b.layer_norm(x, "model.decoder.layer_norm", EPS) if style.norms_first else x
    matrix = _table(shape, style, "model.decoder") if shape.ties_head else style.head
    table = Weight(f"{matrix}.weight", (shape.vocab_size, shape.width))
    bias = (
        Weight("final_logits_bias", (shape.vocab_size,), stored_as="row")
        if style.logits_bias
        else None
    )
    return b.finish(logits=b.linear_from(x, table, bias, name="logits"))


def _table(shape: Seq2SeqShape, style: Seq2SeqStyle, stack: str) -> str:
    return style.table if shape.ties_tables else f"{stack}.embed_tokens"


def _embedding(b: Builder, shape: Seq2SeqShape, style: Seq2SeqStyle, stack: str) -> Value:
    x = b.embedding(
        b.token_ids(),
        _table(shape, style, stack),
        shape.vocab_size,
        shape.width,
        scale=shape.embedding_scale,
    )
    x = b.add(x, style.positions(b, f"{stack}.embed_positions"))
    return b.layer_norm(x, f"{stack}.layernorm_embedding", EPS) if style.norms_embeddings else x


def _part(
    b: Builder, x: Value, norm: str, style: Seq2SeqStyle, compute: Callable[[Value], Value]
) -> Value:
    """Appends a sublayer and its residual sum, normed according to the style."""
    if style.norms_first:
        return b.add(x, compute(b.layer_norm(x, norm, EPS)))
    return b.layer_norm(b.add(x, compute(x)), norm, EPS)


def _attend_self(
    b: Builder,
    x: Value,
    layer: str,
    shape: Seq2SeqShape,
    style: Seq2SeqStyle,
    *,
    group: str,
    index: int,
    mask: MaskKind,
) -> Value:
    num_heads = (shape.encoder if group == "encoder" else shape.decoder).num_heads
    module = f"{layer}.self_attn"

    def compute(h: Value) -> Value:
        q = b.linear(h, f"{module}.q_proj", shape.width, bias=True)
        _write_kv(b, h, module, style, group=group, index=index)
        scale = (shape.width // num_heads) ** -0.5
        h = b.attention(q, group, index, num_heads=num_heads, scale=scale, mask=mask)
        return b.linear(h, f"{module}.out_proj", shape.width, bias=True)

    return _part(b, x, f"{layer}.self_attn_layer_norm", style, compute)


def _attend_cross(
    b: Builder,
    x: Value,
    layer: str,
    shape: Seq2SeqShape,
    style: Seq2SeqStyle,
    *,
    index: int,
    taps: HeadTaps | None = None,
) -> Value:
    num_heads = shape.decoder.num_heads
    module = f"{layer}.encoder_attn"

    def compute(h: Value) -> Value:
        q = b.linear(h, f"{module}.q_proj", shape.width, bias=True)
        if taps is not None:
            taps.add(b, q, index)
        scale = (shape.width // num_heads) ** -0.5
        h = b.attention(q, "cross", index, num_heads=num_heads, scale=scale, mask="full")
        return b.linear(h, f"{module}.out_proj", shape.width, bias=True)

    return _part(b, x, f"{layer}.encoder_attn_layer_norm", style, compute)


def _write_kv(
    b: Builder, x: Value, module: str, style: Seq2SeqStyle, *, group: str, index: int
) -> Value:
    """Appends K and V and writes them; returns K."""
    k = b.linear(x, f"{module}.k_proj", x.width, bias=style.k_bias)
    v = b.linear(x, f"{module}.v_proj", x.width, bias=True)
    b.kv_write(group, index, (k,), v)
    return k


def _feed_forward(
    b: Builder, x: Value, layer: str, shape: Seq2SeqShape, style: Seq2SeqStyle, *, width: int
) -> Value:
    def compute(h: Value) -> Value:
        h = b.act(b.linear(h, f"{layer}.fc1", width, bias=True), shape.activation)
        return b.linear(h, f"{layer}.fc2", shape.width, bias=True)

    return _part(b, x, f"{layer}.final_layer_norm", style, compute)


def sinusoids(shape: Seq2SeqShape, frequencies: Sinusoids, *, offset: int = 0) -> Positions:
    """Returns sinusoidal positions, starting at row `offset`."""
    if shape.width % 2 or shape.width < 4:
        raise UnsupportedModel(
            f"config.json: d_model is {shape.width}, expected an even number of at least 4"
        )
    table = Weight("sinusoids", (shape.num_positions + offset, shape.width), fill=frequencies)
    return lambda b, name: b.embed_positions(table, offset=offset)


def learned_positions(shape: Seq2SeqShape, *, offset: int = 2) -> Positions:
    """Returns learned positions; the table has `offset` rows before the first."""
    return lambda b, name: b.position_embedding(
        name, shape.num_positions + offset, shape.width, offset=offset
    )
