"""Gemma 4's decoder: full-attention layers with larger heads, values computed from keys, per-layer
embeddings, last layers that read earlier layers' KV, a scale per layer, and routed experts in
addition to the MLP.

Gemma team 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, Frame, LayerCache, finish_decoder, plan_cache
from octavo.models.gemma_parts import PerLayerInputs, SharedKvAttention, scale_columns
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_experts, gated_mlp
from octavo.models.rope import tables_by_layer_type
from octavo.program.builder import Builder
from octavo.program.ops import Activation, RmsNorm
from octavo.program.program import Program, Value, Weight

ROPES = {
    "sliding_attention": {"rope_type": "default"},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
"""Default RoPE parameters by layer type."""


def build(config: HfConfig) -> dict[str, Program]:
    return build_gemma4(config, has_media=False)


def build_gemma4(config: HfConfig, *, has_media: bool) -> dict[str, Program]:
    """Builds the decoder; with `has_media` it accepts rows of images, whose tokens are the padding
    token if the model has per-layer embeddings.
    """
    config.refuse_unless("use_bidirectional_attention", "vision")  # images only
    shape = DecoderShape.read(config, num_kv_heads=4, head_dim=256, tied=True)
    windows = layer_windows(config, shape)
    cache = plan_cache(shape, windows, num_shared=config.integer("num_kv_shared_layers", 0))
    layers = Gemma4Layers.read(config, shape, windows, cache.layers)
    full = layers.attention.shapes[-1]
    dim, num_kv_heads = full.head_dim, full.num_kv_heads
    groups = tuple(
        group
        if group.window is not None
        else replace(group, num_kv_heads=num_kv_heads, k_width=dim, v_width=dim)
        for group in cache.groups
    )
    b = Builder("decoder", groups, shape.vocab_size)
    ids, scale = b.token_ids(), shape.hidden_size**0.5
    x = b.embedding(ids, "model.embed_tokens", shape.vocab_size, shape.hidden_size, scale=scale)
    x = embedded = b.scatter_rows(x) if has_media else x
    for i in range(shape.num_layers):
        own = None if layers.own is None else layers.own(b, ids, embedded, i)
        x = layers(b, x, own, i)
    frame = Frame(logit_softcap=config.optional_positive("final_logit_softcapping"))
    return finish_decoder(b, x, shape, frame)


def layer_windows(config: HfConfig, shape: DecoderShape) -> tuple[int | None, ...]:
    """Returns each layer's window; None for full attention, as in the last layer always."""
    windows = config.layer_windows(shape.num_layers, config.window(512), lambda i: (i + 1) % 6 != 0)
    return (*windows[:-1], None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Experts:
    """Softmax-routed experts, each with a learned output scale."""

    num_experts: int
    top_k: int
    width: int
    activation: Activation
    norm_eps: float

    def __call__(self, b: Builder, x: Value, rows: Value, name: str) -> Value:
        """Appends the experts of `rows`; the router reads `x`."""
        router = f"{name}.router"
        normed = b.like(f"{router}.norm", x)
        b.append(RmsNorm(x, normed, Weight(f"{router}.scale", (x.width,)), self.norm_eps))
        logits = b.linear(b.scale(normed, x.width**-0.5), f"{router}.proj", self.num_experts)
        factors = Weight(f"{router}.per_expert_scale", (self.num_experts,))
        return gated_experts(
            b,
            b.route(rows, logits, self.top_k, normalize=True, factors=factors),
            f"{name}.experts",
            num_experts=self.num_experts,
            width=self.width,
            activation=self.activation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Layers:
    """Appends layers."""

    shape: DecoderShape
    attention: SharedKvAttention
    widths: Sequence[int]
    """MLP width of each layer."""
    activation: Activation
    own: PerLayerInputs | None
    experts: Gemma4Experts | None

    @staticmethod
    def read(
        config: HfConfig,
        shape: DecoderShape,
        windows: Sequence[int | None],
        caches: Sequence[LayerCache],
    ) -> Gemma4Layers:
        num_layers, num_shared = shape.num_layers, config.integer("num_kv_shared_layers", 0)
        keys_as_values = config.flag("attention_k_eq_v", False)
        full_shape = _full_shape(config, shape, windows)
        sliding, full = tables_by_layer_type(
            config
            if config.table("rope_parameters")
            else config.with_values(rope_parameters=ROPES),
            shape.head_dim,
            sliding_theta=10_000.0,
            full_theta=1_000_000.0,
            full_head_dim=full_shape.head_dim,
        )
        is_full = [window is None for window in windows]
        width = config.size("intermediate_size", 9216)
        shared_width = 2 * width if config.flag("use_double_wide_mlp", False) else width
        own_width = config.integer("hidden_size_per_layer_input", 256)
        own_vocab_size = config.integer("vocab_size_per_layer_input", 262_144, low=1)
        activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
        config.without_effect("num_experts", "top_k_experts", "moe_intermediate_size")
        experts = None
        if config.flag("enable_moe_block", False):
            experts = Gemma4Experts(
                num_experts=config.count("num_experts"),
                top_k=config.count("top_k_experts"),
                width=config.size("moe_intermediate_size"),
                activation=activation,
                norm_eps=shape.norm_eps,
            )
        return Gemma4Layers(
            shape=shape,
            attention=SharedKvAttention(
                shapes=[full_shape if each else shape for each in is_full],
                caches=caches,
                ropes=[full if each else sliding for each in is_full],
                num_own=num_layers - num_shared,
                bias=config.flag("attention_bias", False),
                keys_as_values=[each and keys_as_values for each in is_full],
            ),
            widths=[width] * (num_layers - num_shared) + [shared_width] * num_shared,
            activation=activation,
            own=PerLayerInputs(shape, own_width, own_vocab_size) if own_width else None,
            experts=experts,
        )

    def __call__(self, b: Builder, x: Value, own: Value | None, i: int) -> Value:
        """Appends layer i; `own` are its per-layer embeddings."""
        name = f"model.layers.{i}"
        h = self.attention(b, self._norm(b, x, f"{name}.input_layernorm"), i)
        x = b.add(x, self._norm(b, h, f"{name}.post_attention_layernorm"))
        rows = self._norm(b, x, f"{name}.pre_feedforward_layernorm")
        h = gated_mlp(b, rows, f"{name}.mlp", self.widths[i], self.activation)
        if self.experts is not None:
            h = self._norm(b, h, f"{name}.post_feedforward_layernorm_1")
            rows = self._norm(b, x, f"{name}.pre_feedforward_layernorm_2")
            chosen = self.experts(b, x, rows, name)
            h = b.add(h, self._norm(b, chosen, f"{name}.post_feedforward_layernorm_2"))
        x = b.add(x, self._norm(b, h, f"{name}.post_feedforward_layernorm"))
        if own is not None:
            gate = b.linear(x, f"{name}.per_layer_input_gate", own.width)
            rows = b.act_mul(gate, own, self.activation)
            h = b.linear(rows, f"{name}.per_layer_projection", x.width)
            x = b.add(x, self._norm(b, h, f"{name}.post_per_layer_input_norm"))
        return scale_columns(b, x, f"{name}.layer_scalar", 1)

    def _norm(self, b: Builder, x: Value, name: str) -> Value:
        return b.rms_norm(x, name, self.shape.norm_eps)


def _full_shape(
    config: HfConfig, shape: DecoderShape, windows: Sequence[int | None]
) -> DecoderShape:
    """Returns the shape of full layers, from `per_layer_config` or older keys."""
    config.without_effect("global_head_dim", "num_global_key_value_heads")
    heads: dict[str, Any] = {"head_dim": config.size("global_head_dim", 512)}
    if config.flag("attention_k_eq_v", False):
        heads["num_key_value_heads"] = config.values.get("num_global_key_value_heads")
    if config.values.get("per_layer_config") is not None:
        by_layer = config.table("per_layer_config")
        heads = next(iter(by_layer.values()), {})
        full = {i for i, window in enumerate(windows) if window is None and by_layer}
        layers = {int(layer) for layer in by_layer if layer.isdecimal()}
        if layers != full or any(each != heads for each in by_layer.values()):
            raise UnsupportedModel(
                "config.json: per_layer_config has other values for some layers, expected the same"
                " for each full_attention layer, and none for others"
            )
    given = HfConfig({"model_type": config.model_type, **heads})
    head_dim = given.size("head_dim", shape.head_dim)
    num_kv_heads = given.size("num_key_value_heads", shape.num_kv_heads)
    others = heads.keys() - {"head_dim", "num_key_value_heads"}
    if others or shape.num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"config.json: the full_attention layers have {heads}, expected head_dim and"
            f" num_key_value_heads, a divisor of {shape.num_heads} heads"
        )
    return replace(shape, head_dim=head_dim, num_kv_heads=num_kv_heads)
