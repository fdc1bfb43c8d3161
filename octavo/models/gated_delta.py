"""Gated DeltaNet mixer: a convolution and a delta-rule recurrence.

Source: Yang et al. 2024; transformers' Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import (
    DecoderShape,
    LayerCache,
    PredictionLayer,
    Sublayer,
    plan_cache,
    rms_norm,
)
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import LayerPlan, layers_by_type
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.models.state_space import CONV, MAX_TAPS, STATE
from octavo.program.build_mixers import delta_scan, short_conv
from octavo.program.builder import Builder
from octavo.program.ops import Activation, RopeTable
from octavo.program.program import CacheGroup, Value, Weight

PARTIAL = 0.25
"""Default of partial_rotary_factor."""

MTP_LAYERS = "mtp.layers"
"""Module of the multi-token-prediction layers."""

L2_EPS = 1e-6
"""Epsilon of the keys' L2 norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """The mixer: q, k, v = f(conv(in(rows))); out(norm(scan(v, k / |k|, q / |q|)) * f(gate))."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    taps: int
    activation: Activation
    norm_eps: float
    stacked: bool
    """Whether q, k, v and gate are one module, grouped by key head (Qwen3-Next); otherwise two
    modules.
    """
    stacked_steps: bool
    """Whether beta and dt are one module, grouped by key head; otherwise two modules."""
    index: Sequence[int]
    """Index of each layer within the cache groups."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        keys = self.num_k_heads * self.k_dim
        return keys, keys, self.num_v_heads * self.v_dim

    def groups(self, num_layers: int) -> tuple[CacheGroup, CacheGroup]:
        return (
            CacheGroup(CONV, "conv", num_layers, 1, sum(self.widths), 0, window=self.taps),
            CacheGroup(STATE, "state", num_layers, self.num_v_heads, self.v_dim, self.k_dim),
        )

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name, at = f"model.layers.{layer}.linear_attn", self.index[layer]
        qkv, gate = (self._stack if self.stacked else self._project_apart)(b, x, name)
        beta, dt = self._steps(b, x, name)
        q, k, v = short_conv(
            b, qkv, f"{name}.conv1d", CONV, at, activation=self.activation, widths=self.widths
        )
        k = b.scale(unit_rows(b, k, f"{name}.k", self.k_dim), self.k_dim**-0.5)
        q = b.scale(unit_rows(b, q, f"{name}.q", self.k_dim), 1 / self.k_dim)
        rate = Weight(f"{name}.A_log", (self.num_v_heads,))
        rows = (v, dt, k, q, b.act(beta, "sigmoid"))
        scanned = delta_scan(b, rows, name, STATE, at, state_size=self.k_dim, a_log=rate)
        normed = b.rms_norm(scanned, f"{name}.norm", self.norm_eps, group_width=self.v_dim)
        return b.linear(b.act_mul(gate, normed, "silu"), f"{name}.out_proj", x.width)

    def _project_apart(self, b: Builder, x: Value, name: str) -> tuple[Value, Value]:
        """Appends the projections for the convolution's input and the gate."""
        qkv = b.linear(x, f"{name}.in_proj_qkv", sum(self.widths))
        return qkv, b.linear(x, f"{name}.in_proj_z", self.widths[2])

    def _stack(self, b: Builder, x: Value, name: str) -> tuple[Value, Value]:
        """Appends the same projections for a module that interleaves q, k, v and gate by
        key head.
        """
        lanes = self.num_v_heads // self.num_k_heads
        runs = (self.k_dim, self.k_dim, lanes * self.v_dim, lanes * self.v_dim)
        step, total = sum(runs), sum(runs) * self.num_k_heads
        module = f"{name}.in_proj_qkvz"
        parts = [
            Rows(run * self.num_k_heads, total, sum(runs[:index]), step, run)
            for index, run in enumerate(runs)
        ]
        picked = [
            Weight(
                f"{module}.weight",
                (rows.width, x.width),
                (),
                *(False, rows.total, rows.start, rows.step, rows.run),
            )
            for rows in parts[:3]
        ]
        return b.linear_concat(x, picked, name=module), linear_part(b, x, module, parts[3])

    def _steps(self, b: Builder, x: Value, name: str) -> tuple[Value, Value]:
        """Appends the projections for beta and dt."""
        if not self.stacked_steps:
            beta, dt = (b.linear(x, f"{name}.in_proj_{part}", self.num_v_heads) for part in "ba")
            return beta, dt
        lanes = self.num_v_heads // self.num_k_heads
        beta, dt = (
            linear_part(
                b,
                x,
                f"{name}.in_proj_ba",
                Rows(self.num_v_heads, 2 * self.num_v_heads, start, 2 * lanes, lanes),
            )
            for start in (0, lanes)
        )
        return beta, dt


def unit_rows(b: Builder, x: Value, name: str, width: int) -> Value:
    """Appends L2 normalization of each head of `width` columns, as an RMS norm: the length becomes
    the square root of `width`.
    """
    return b.rms_norm(x, name, L2_EPS / width, has_weight=False, group_width=width)


def read_mixer(
    config: HfConfig, shape: DecoderShape, plan: LayerPlan, *, stacked: bool
) -> GatedDelta:
    """Reads the mixer's sizes; in GGUF (`separate_gates`) the gates are separate tensors."""
    num_k, num_v = (
        config.size(f"linear_num_{part}_heads", default)
        for part, default in (("key", 16), ("value", 32))
    )
    if num_v % num_k:
        raise UnsupportedModel(
            f"config.json: linear_num_value_heads is {num_v}, expected a multiple of"
            f" linear_num_key_heads ({num_k})"
        )
    return GatedDelta(
        num_k_heads=num_k,
        num_v_heads=num_v,
        k_dim=config.size("linear_key_head_dim", 128),
        v_dim=config.size("linear_value_head_dim", 128),
        taps=config.integer("linear_conv_kernel_dim", 4, low=1, high=MAX_TAPS),
        activation=config.activation("hidden_act", "silu"),
        norm_eps=shape.norm_eps,
        stacked=stacked and not config.flag("separate_gates", False),
        stacked_steps=stacked,
        index=plan.index,
    )


def read_plan(config: HfConfig, num_layers: int) -> LayerPlan:
    """Reads which layers use attention: from the config, or every fourth."""
    interval = config.integer("full_attention_interval", 4, low=1)
    found = layers_by_type(config, num_layers)
    if found is not None:
        return found
    attends = [(layer + 1) % interval == 0 for layer in range(num_layers)]
    return LayerPlan(attends, [not attend for attend in attends])


def make_cache_groups(
    shape: DecoderShape, plan: LayerPlan, mixer: GatedDelta
) -> tuple[CacheGroup, ...]:
    num_attention, num_mixers = sum(plan.attends), sum(plan.recurs)
    heads = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
    full = (CacheGroup("full", "full", num_attention, *heads),) if num_attention else ()
    return full + (mixer.groups(num_mixers) if num_mixers else ())


def text_rope(config: HfConfig, shape: DecoderShape) -> RopeTable:
    """Returns partial RoPE. A text's positions are equal on all axes, so mrope_section has no
    effect.
    """
    given = config.table("rope_parameters")
    text_only = {key: given[key] for key in given if not key.startswith("mrope_")}
    text = config.with_values(rope_parameters=text_only)
    return rope_parameters(text, partial=PARTIAL).table(shape.head_dim)


def gated_attention(
    config: HfConfig,
    shape: DecoderShape,
    caches: Sequence[LayerCache],
    rope: RopeTable | None = None,
    *,
    layers: str = "model.layers",
) -> SelfAttention:
    """Returns attention with head norms, output gates and RoPE, by default that of text."""
    bias = config.flag("attention_bias", False)
    rope = rope or text_rope(config, shape)
    return SelfAttention(
        shape=shape,
        caches=caches,
        ropes=[rope] * shape.num_layers,
        scale=shape.head_dim**-0.5,
        layers=layers,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        norm_offset=1.0,
        gated=True,
    )


def gated_prediction_layer(
    config: HfConfig, shape: DecoderShape, mlp: Sublayer, rope: RopeTable | None = None
) -> PredictionLayer:
    """Returns the multi-token-prediction layer: attention whatever the model's layers are, and
    tensors named `mtp.*`. `mlp` names its modules after `MTP_LAYERS`.
    """
    cache = plan_cache(replace(shape, num_layers=1), [None])
    return PredictionLayer(
        shape=shape,
        group=cache.groups[0],
        attention=gated_attention(config, shape, cache.layers, rope, layers=MTP_LAYERS),
        mlp=mlp,
        module="mtp",
        layer=f"{MTP_LAYERS}.0",
        number=0,
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
        head="lm_head",
        norm=rms_norm(shape.norm_eps, offset=1.0),
        returns_normed=True,
    )
