"""Gemma 3n's decoder: multiple residual streams (AltUp), a low-rank branch parallel to attention
(Laurel), per-layer embeddings, sparse gates, and final layers that reuse earlier layers' KV.

Gemma team 2025; AltUp: Baykal et al. 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, Frame, finish_decoder, plan_cache
from octavo.models.gemma_parts import PerLayerInputs, SharedKvAttention, scale_columns
from octavo.models.hf_config import HfConfig
from octavo.models.rope import tables_by_layer_type
from octavo.program.build_family_ops import mix
from octavo.program.builder import Builder
from octavo.program.family_ops import KeepLargest, MatchMagnitude
from octavo.program.ops import Activation
from octavo.program.program import CacheGroup, Program, Value

LEAST_SQUARE = 1e-5
"""Lower bound of the mean square when a stream is rescaled."""
MOST_STREAMS = 8
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Default number of first layers with sparse gates, and their fraction of zeros."""


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")
    shape = DecoderShape.read(config, num_kv_heads=2, head_dim=256, tied=True)
    windows = config.layer_windows(shape.num_layers, config.window(512), lambda i: (i + 1) % 5 != 0)
    layers = Gemma3nLayers.read(config, shape, windows)
    b = Builder("decoder", layers.groups, shape.vocab_size)
    ids, name = b.token_ids(), "model.embed_tokens"
    scale = shape.hidden_size**0.5
    embedded = b.embedding(ids, name, shape.vocab_size, shape.hidden_size, scale=scale)
    streams = [embedded]
    for i in range(layers.num_streams - 1):
        other = b.linear(embedded, f"model.altup_projections.{i}", shape.hidden_size)
        streams.append(match_magnitude(b, other, embedded, least=LEAST_SQUARE))
    for i in range(shape.num_layers):
        streams = layers(b, streams, layers.own(b, ids, embedded, i), i)
    x = streams[0]
    for i, stream in enumerate(streams[1:]):
        other = b.linear(stream, f"model.altup_unembed_projections.{i}", shape.hidden_size)
        x = b.add(x, match_magnitude(b, other, streams[0], least=LEAST_SQUARE))
    x = b.scale(x, 1 / layers.num_streams)
    cap = config.cap("final_logit_softcapping", 30.0)
    return finish_decoder(b, x, shape, Frame(logit_softcap=cap))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nLayers:
    """Appends layers; each call takes and returns all streams."""

    shape: DecoderShape
    groups: tuple[CacheGroup, ...]
    attention: SharedKvAttention
    num_streams: int
    active: int
    """Index of the stream that attention and MLP are applied to."""
    scales_active: bool
    own: PerLayerInputs
    laurel_rank: int
    widths: Sequence[int]
    """MLP width of each layer."""
    deviations: Sequence[float | None]
    """Gate threshold per layer, in standard deviations above the mean; None: not sparse."""
    activation: Activation

    @staticmethod
    def read(config: HfConfig, shape: DecoderShape, windows: Sequence[int | None]) -> Gemma3nLayers:
        num_layers, num_shared = shape.num_layers, config.integer("num_kv_shared_layers", 15)
        cache = plan_cache(shape, windows, num_shared=num_shared)
        sliding, full = tables_by_layer_type(
            config,
            shape.head_dim,
            sliding_theta=config.number("rope_local_base_freq", 10_000.0),
            full_theta=config.number("rope_theta", 1_000_000.0),
        )
        num_streams = config.integer("altup_num_inputs", 4, low=1, high=MOST_STREAMS)
        return Gemma3nLayers(
            shape=shape,
            groups=cache.groups,
            attention=SharedKvAttention(
                shapes=[shape] * num_layers,
                caches=cache.layers,
                ropes=[full if window is None else sliding for window in windows],
                num_own=num_layers - num_shared,
                bias=config.flag("attention_bias", False),
            ),
            num_streams=num_streams,
            active=config.integer("altup_active_idx", 0, high=num_streams - 1),
            scales_active=config.flag("altup_correct_scale", True),
            own=PerLayerInputs(
                shape,
                config.size("hidden_size_per_layer_input", 256),
                config.integer("vocab_size_per_layer_input", 262_144, low=1),
            ),
            laurel_rank=config.size("laurel_rank", 64),
            widths=_by_layer(config, "intermediate_size", num_layers),
            deviations=_deviations(config, num_layers),
            activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        )

    def __call__(self, b: Builder, streams: list[Value], own: Value, i: int) -> list[Value]:
        name = f"model.layers.{i}"
        coefs = self._coefs(b, streams[self.active], name, "prediction_coefs", self.num_streams**2)
        predicted = mix(b, streams, streams, coefs)
        active = predicted[self.active]
        rows = self._norm(b, active, f"{name}.input_layernorm")
        laurel = b.linear(rows, f"{name}.laurel.linear_left", self.laurel_rank)
        laurel = b.linear(laurel, f"{name}.laurel.linear_right", rows.width)
        laurel = b.add(rows, self._norm(b, laurel, f"{name}.laurel.post_laurel_norm"))
        h = self._norm(b, self.attention(b, rows, i), f"{name}.post_attention_layernorm")
        h = b.scale(b.add(b.add(active, h), laurel), 1 / math.sqrt(2))
        rows = self._norm(b, h, f"{name}.pre_feedforward_layernorm")
        rows = self._norm(b, self._mlp(b, rows, i), f"{name}.post_feedforward_layernorm")
        computed = b.add(h, rows)
        coefs = self._coefs(b, computed, name, "correction_coefs", self.num_streams)
        innovation = b.add(computed, b.scale(active, -1.0))
        corrected = mix(b, [innovation], predicted, coefs, offset=1.0)
        added = self._add_own_input(b, corrected[self.active], own, name)
        return [corrected[0], *(b.add(stream, added) for stream in corrected[1:])]

    def _norm(self, b: Builder, x: Value, name: str) -> Value:
        return b.rms_norm(x, name, self.shape.norm_eps)

    def _coefs(self, b: Builder, x: Value, layer: str, name: str, count: int) -> Value:
        """Appends a row's mixing coefficients."""
        rows = self._norm(b, x, f"{layer}.altup.router_norm")
        rows = b.scale(rows, 1 / self.shape.hidden_size)
        router = b.linear(rows, f"{layer}.altup.modality_router", self.num_streams)
        return b.linear(b.act(router, "tanh"), f"{layer}.altup.{name}", count)

    def _mlp(self, b: Builder, x: Value, i: int) -> Value:
        name, deviations = f"model.layers.{i}.mlp", self.deviations[i]
        gate = b.linear(x, f"{name}.gate_proj", self.widths[i])
        up = b.linear(x, f"{name}.up_proj", self.widths[i])
        if deviations is not None:
            gate = keep_largest(b, gate, deviations)
        return b.linear(b.act_mul(gate, up, self.activation), f"{name}.down_proj", x.width)

    def _add_own_input(self, b: Builder, x: Value, own: Value, name: str) -> Value:
        """Appends the contribution of per-layer embeddings to all streams but the first."""
        if self.scales_active:
            x = scale_columns(b, x, f"{name}.altup.correct_output_scale")
        gate = b.linear(x, f"{name}.per_layer_input_gate", self.own.width)
        rows = b.act_mul(gate, own, self.activation)
        rows = b.linear(rows, f"{name}.per_layer_projection", self.shape.hidden_size)
        return self._norm(b, rows, f"{name}.post_per_layer_input_norm")


def _by_layer(config: HfConfig, name: str, num_layers: int) -> list[int]:
    """Reads a width per layer, or one for all."""
    value = config.values.get(name)
    if not isinstance(value, list):
        return [config.size(name, 16_384)] * num_layers
    widths = [HfConfig({name: each}).size(name) for each in value]
    if len(widths) != num_layers:
        raise UnsupportedModel(
            f"config.json: {name} has {len(widths)} entries, expected {num_layers}"
        )
    return widths


def _deviations(config: HfConfig, num_layers: int) -> list[float | None]:
    """Reads the gate threshold of each layer, in standard deviations above the mean."""
    value = config.values.get("activation_sparsity_pattern")
    num_sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
    if value is None:
        value = [SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    shares = value if isinstance(value, list) else [value] * num_layers
    if len(shares) != num_layers or not all(_is_share(share) for share in shares):
        raise UnsupportedModel(
            f"config.json: activation_sparsity_pattern is {value!r:.80}, expected {num_layers}"
            " numbers from 0 to less than 1"
        )
    return [NormalDist().inv_cdf(share) if share > 0 else None for share in shares]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def match_magnitude(b: Builder, x: Value, like: Value, *, least: float) -> Value:
    out = b.like("matched", x)
    b.append(MatchMagnitude(x, like, out, least))
    return out


def keep_largest(b: Builder, x: Value, deviations: float) -> Value:
    out = b.like("largest", x)
    b.append(KeepLargest(x, out, deviations))
    return out
