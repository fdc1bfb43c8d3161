"""The parts that pre-norm decoders share: their shape, cache groups, the block, and the usual
attention and MLPs.

A family's file builds its own parts and hands them to `build_decoder`. Weight names are those of
Hugging Face's checkpoints of the Llama line (`model.layers.N.self_attn.q_proj.weight`). Knows no
device and no file. Block: Touvron et al. 2023; GQA: Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.program.builder import Builder
from octavo.program.ops import Activation, MaskKind, RopeTable
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

    @staticmethod
    def read(
        config: HfConfig, *, head_dim: int | None = None, norm_eps: float = 1e-6, tied: bool = False
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
            norm_eps=config.number("rms_norm_eps", norm_eps),
            tied=config.flag("tie_word_embeddings", tied),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Grouped-query attention with rope. `ropes` has one table for each layer."""

    shape: DecoderShape
    caches: Sequence[LayerCache]
    ropes: Sequence[RopeTable]
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    """Whether q and k are normed head by head (Qwen3, Gemma 3)."""
    norm_offset: float = 0.0
    sinks: bool = False

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        shape, cache, rope = self.shape, self.caches[layer], self.ropes[layer]
        name = f"model.layers.{layer}.self_attn"
        q = b.linear(x, f"{name}.q_proj", shape.num_heads * shape.head_dim, bias=self.qkv_bias)
        k = b.linear(x, f"{name}.k_proj", shape.num_kv_heads * shape.head_dim, bias=self.qkv_bias)
        v = b.linear(x, f"{name}.v_proj", shape.num_kv_heads * shape.head_dim, bias=self.qkv_bias)
        if self.head_norms:
            q = b.rms_norm(
                q,
                f"{name}.q_norm",
                shape.norm_eps,
                weight_offset=self.norm_offset,
                group_width=shape.head_dim,
            )
            k = b.rms_norm(
                k,
                f"{name}.k_norm",
                shape.norm_eps,
                weight_offset=self.norm_offset,
                group_width=shape.head_dim,
            )
        q = b.rope(q, shape.num_heads, rope)
        k = b.rope(k, shape.num_kv_heads, rope)
        b.kv_write(cache.group, cache.layer, (k,), v)
        sinks = Weight(f"{name}.sinks", (shape.num_heads,)) if self.sinks else None
        out = b.attention(
            q,
            cache.group,
            cache.layer,
            num_heads=shape.num_heads,
            scale=self.scale,
            mask=cache.mask,
            sinks=sinks,
        )
        return b.linear(out, f"{name}.o_proj", shape.hidden_size, bias=self.out_bias)


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
) -> Value:
    """Appends the chosen experts' gated MLPs, weighted and summed. Checkpoints keep one tensor for
    each expert and projection.
    """
    rows, ids, weights = routed
    hidden_size = rows.width

    def weight(projection: str, out_width: int, in_width: int) -> Weight:
        sources = tuple(f"{name}.{e}.{projection}.weight" for e in range(num_experts))
        return Weight(f"{name}.{projection}.weight", (num_experts, out_width, in_width), sources)

    gate = b.grouped_linear(rows, ids, weight("gate_proj", width, hidden_size))
    up = b.grouped_linear(rows, ids, weight("up_proj", width, hidden_size))
    down = b.grouped_linear(
        b.act_mul(gate, up, activation), ids, weight("down_proj", hidden_size, width)
    )
    return b.combine(down, weights)


@dataclass(frozen=True, slots=True)
class NormNames:
    """Module names of a layer's norms; those after a sublayer exist in a few families only."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


def build_decoder(
    shape: DecoderShape,
    groups: tuple[CacheGroup, ...],
    attention: Sublayer,
    mlp: Sublayer,
    *,
    norms: NormNames = NormNames(),
    norm_offset: float = 0.0,
    embedding_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Program:
    """Builds the decoder: x = embedding; in each layer x += attention(norm(x)), x += mlp(norm(x));
    logits = head(norm(sampled rows of x)).
    """
    b = Builder("decoder", groups, shape.vocab_size)

    def norm(x: Value, name: str | None) -> Value:
        return x if name is None else b.rms_norm(x, name, shape.norm_eps, weight_offset=norm_offset)

    x = b.embedding(
        b.token_ids(),
        "model.embed_tokens",
        shape.vocab_size,
        shape.hidden_size,
        scale=embedding_scale,
    )
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        h = attention(b, norm(x, layer + norms.before_attention), i)
        x = b.add(x, norm(h, norms.after_attention and layer + norms.after_attention))
        h = mlp(b, norm(x, layer + norms.before_mlp), i)
        x = b.add(x, norm(h, norms.after_mlp and layer + norms.after_mlp))
    x = norm(b.gather_rows(x), "model.norm")
    logits = b.linear(x, "model.embed_tokens" if shape.tied else "lm_head", shape.vocab_size)
    return b.finish(logits=b.softcap(logits, logit_softcap))
