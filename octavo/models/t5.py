"""T5: encoder-decoder with relative position biases, no RoPE, unscaled attention. Raffel et al.
2020.

Versions 1.0 (relu, tied and scaled output) and 1.1 (gated gelu, untied output), also Flan-T5. The
encoder processes the complete input at once and stores each decoder layer's cross K and V in the
group "cross".
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.program.builder import Builder
from octavo.program.ops import Activation, MaskKind, T5Bias
from octavo.program.program import CacheGroup, Program, Value, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Shape:
    vocab_size: int
    width: int
    head_dim: int
    num_heads: int
    hidden_width: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_buckets: int
    max_distance: int
    eps: float
    activation: Activation
    gated: bool
    tied: bool
    scaled: bool
    """Whether outputs are divided by sqrt(width) before the output layer."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of both Programs, identical, so that both index slots and block tables
        alike.
        """
        heads = (self.num_heads, self.head_dim, self.head_dim)
        return (
            CacheGroup(
                "encoder", "full", self.num_encoder_layers, *heads, one_step=True, of_input=True
            ),
            CacheGroup("decoder", "full", self.num_decoder_layers, *heads),
            CacheGroup("cross", "cross", self.num_decoder_layers, *heads),
        )


def build(config: HfConfig) -> dict[str, Program]:
    return build_t5(read_shape(config))


def build_t5(shape: T5Shape) -> dict[str, Program]:
    return {"encoder": build_encoder(shape), "decoder": build_decoder(shape)}


def read_shape(config: HfConfig, *, scaled: bool | None = None) -> T5Shape:
    """Reads the sizes.

    `scaled`: default for dividing outputs by sqrt(width). Activation keys of newer files take
    precedence over feed_forward_proj.
    """
    projection = config.text("feed_forward_proj", "relu")
    gated, name = projection.startswith("gated-"), projection.split("-")[-1]
    if projection.count("-") > gated:
        raise UnsupportedModel(
            f"config.json: feed_forward_proj is {projection!r}, expected ACTIVATION or"
            " gated-ACTIVATION"
        )
    # transformers 5 always writes tie_word_embeddings, and has a separate key for scaling.
    scales = config.values.get("tie_word_embeddings") is not False
    num_layers = config.count("num_layers")
    return T5Shape(
        vocab_size=config.integer("vocab_size", low=1),
        width=config.size("d_model"),
        head_dim=config.size("d_kv"),
        num_heads=config.size("num_heads"),
        hidden_width=config.size("d_ff"),
        num_encoder_layers=num_layers,
        num_decoder_layers=config.count("num_decoder_layers", num_layers),
        num_buckets=config.size("relative_attention_num_buckets", 32),
        max_distance=config.integer("relative_attention_max_distance", 128, low=1),
        eps=config.number("layer_norm_epsilon", 1e-6),
        activation=config.activation(
            "dense_act_fn", "gelu_new" if projection == "gated-gelu" else name
        ),
        gated=config.flag("is_gated_act", gated),
        tied=config.ties_head(True),
        scaled=config.flag("scale_decoder_outputs", scales) if scaled is None else scaled,
    )


def build_encoder(shape: T5Shape) -> Program:
    b = Builder("encoder", shape.groups, shape.vocab_size)
    x = b.embedding(b.token_ids(), "shared", shape.vocab_size, shape.width)
    for i in range(shape.num_encoder_layers):
        block = f"encoder.block.{i}.layer"
        x = b.add(
            x, self_attention(b, x, f"{block}.0", shape, group="encoder", layer=i, mask="full")
        )
        x = b.add(x, feed_forward(b, x, f"{block}.1", shape))
    x = b.rms_norm(x, "encoder.final_layer_norm", shape.eps)
    for i in range(shape.num_decoder_layers):
        write_kv(b, x, f"decoder.block.{i}.layer.1.EncDecAttention", shape, group="cross", layer=i)
    return b.finish(encoded=b.pool_rows(x, "last"))


def build_decoder(shape: T5Shape) -> Program:
    b = Builder("decoder", shape.groups, shape.vocab_size)
    x = b.embedding(b.token_ids(), "shared", shape.vocab_size, shape.width)
    for i in range(shape.num_decoder_layers):
        block = f"decoder.block.{i}.layer"
        x = b.add(
            x, self_attention(b, x, f"{block}.0", shape, group="decoder", layer=i, mask="causal")
        )
        x = b.add(x, cross_attention(b, x, f"{block}.1", shape, layer=i))
        x = b.add(x, feed_forward(b, x, f"{block}.2", shape))
    x = b.rms_norm(b.gather_rows(x), "decoder.final_layer_norm", shape.eps)
    x = b.scale(x, shape.width**-0.5 if shape.scaled else 1.0)
    return b.finish(logits=b.linear(x, "shared" if shape.tied else "lm_head", shape.vocab_size))


def self_attention(
    b: Builder, x: Value, module: str, shape: T5Shape, *, group: str, layer: int, mask: MaskKind
) -> Value:
    """Appends self-attention; all layers of a stack share the first one's bias table."""
    h = b.rms_norm(x, f"{module}.layer_norm", shape.eps)
    q = b.linear(h, f"{module}.SelfAttention.q", shape.num_heads * shape.head_dim)
    write_kv(b, h, f"{module}.SelfAttention", shape, group=group, layer=layer)
    table = Weight(
        f"{group}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        (shape.num_buckets, shape.num_heads),
    )
    bias = T5Bias(table, shape.num_buckets, shape.max_distance, bidirectional=mask == "full")
    h = b.attention(q, group, layer, num_heads=shape.num_heads, scale=1.0, mask=mask, bias=bias)
    return b.linear(h, f"{module}.SelfAttention.o", shape.width)


def cross_attention(b: Builder, x: Value, module: str, shape: T5Shape, *, layer: int) -> Value:
    h = b.rms_norm(x, f"{module}.layer_norm", shape.eps)
    q = b.linear(h, f"{module}.EncDecAttention.q", shape.num_heads * shape.head_dim)
    h = b.attention(q, "cross", layer, num_heads=shape.num_heads, scale=1.0, mask="full")
    return b.linear(h, f"{module}.EncDecAttention.o", shape.width)


def write_kv(b: Builder, x: Value, module: str, shape: T5Shape, *, group: str, layer: int) -> None:
    k = b.linear(x, f"{module}.k", shape.num_heads * shape.head_dim)
    v = b.linear(x, f"{module}.v", shape.num_heads * shape.head_dim)
    b.kv_write(group, layer, (k,), v)


def feed_forward(b: Builder, x: Value, layer: str, shape: T5Shape) -> Value:
    h = b.rms_norm(x, f"{layer}.layer_norm", shape.eps)
    module = f"{layer}.DenseReluDense"
    if shape.gated:
        gate = b.linear(h, f"{module}.wi_0", shape.hidden_width)
        h = b.act_mul(gate, b.linear(h, f"{module}.wi_1", shape.hidden_width), shape.activation)
    else:
        h = b.act(b.linear(h, f"{module}.wi", shape.hidden_width), shape.activation)
    return b.linear(h, f"{module}.wo", shape.width)
