"""Common parts of hybrid families (attention and recurrence): cache groups, attention, and
Mamba-2's mixer.

Source: transformers' Bamba, whose configuration the others follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, LayerCache, Sublayer
from octavo.models.hf_config import HfConfig
from octavo.models.self_attention import SelfAttention
from octavo.models.state_space import MAX_TAPS, Mamba2, StateSpace, step_limits
from octavo.program.builder import Builder
from octavo.program.ops import RopeTable
from octavo.program.program import CacheGroup, Value


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Which layers have attention and which have a recurrence; a layer may have both or neither."""

    attends: Sequence[bool]
    recurs: Sequence[bool]

    @property
    def caches(self) -> list[LayerCache]:
        """Cache group and index of each layer's attention; meaningless for other layers."""
        return [LayerCache("full", index, mask="causal") for index in _indices(self.attends)]

    @property
    def index(self) -> list[int]:
        """Index of each layer's mixer within its groups; meaningless for other layers."""
        return _indices(self.recurs)

    def groups(
        self, shape: DecoderShape, sizes: StateSpace, conv_width: int
    ) -> tuple[CacheGroup, ...]:
        num_attention, num_mixers = sum(self.attends), sum(self.recurs)
        heads = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
        full = (CacheGroup("full", "full", num_attention, *heads),) if num_attention else ()
        return full + (sizes.groups(num_mixers, conv_width) if num_mixers else ())

    def mix(self, attention: Sublayer, mixer: Sublayer) -> Sublayer:
        """Returns a sublayer that uses attention or the mixer, depending on the layer."""

        def append(b: Builder, x: Value, layer: int) -> Value:
            return (attention if self.attends[layer] else mixer)(b, x, layer)

        return append


def _indices(chosen: Sequence[bool]) -> list[int]:
    return [sum(chosen[:layer]) for layer in range(len(chosen))]


def layers_by_type(config: HfConfig, num_layers: int) -> LayerPlan | None:
    """Reads which layers have attention from a list of types (transformers 4 or 5 names). Returns
    None if the config has no list.
    """
    types = config.values.get("layer_types")
    if types is None:
        return None
    attends, recurs = ("full_attention", "attention"), ("linear_attention", "mamba")
    known = {*attends, *recurs}
    if not isinstance(types, list) or len(types) != num_layers or not known.issuperset(types):
        raise UnsupportedModel(
            f"config.json: layer_types is {types!r}, expected {num_layers} entries from"
            f" {', '.join(attends + recurs)}"
        )
    return LayerPlan([kind in attends for kind in types], [kind in recurs for kind in types])


def self_attention(
    config: HfConfig,
    shape: DecoderShape,
    plan: LayerPlan,
    rope: RopeTable | None,
    scale: float,
    *,
    layers: str = "model.layers",
    module: str = "self_attn",
) -> SelfAttention:
    """Returns the attention of the layers that have it."""
    bias = config.flag("attention_bias", False)
    return SelfAttention(
        shape=shape,
        caches=plan.caches,
        ropes=[rope] * shape.num_layers,
        scale=scale,
        layers=layers,
        module=module,
        qkv_bias=bias,
        out_bias=bias,
    )


def mamba2_sizes(config: HfConfig, hidden_size: int, inner: int | None = None) -> StateSpace:
    """Reads the sizes of Mamba-2's mixer; `inner` defaults to mamba_expand * hidden_size."""
    inner = inner or int(config.positive("mamba_expand", 2) * hidden_size)
    num_heads, num_runs = config.size("mamba_n_heads", 128), config.size("mamba_n_groups", 1)
    width = inner // num_heads
    if config.values.get("mamba_d_head") not in (None, "auto"):
        width = config.size("mamba_d_head")
    if num_heads * width != inner or num_heads % num_runs:
        raise UnsupportedModel(
            f"config.json: mamba_n_heads is {num_heads}, expected a divisor of {inner} columns"
            f" and a multiple of mamba_n_groups ({num_runs})"
        )
    config.without_effect("mamba_chunk_size")
    return StateSpace(
        inner=inner,
        num_heads=num_heads,
        state_size=config.size("mamba_d_state", 256),
        taps=config.integer("mamba_d_conv", 4, low=1, high=MAX_TAPS),
        activation=config.activation("hidden_act", "silu"),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        num_runs=num_runs,
    )


def mamba2_mixer(
    config: HfConfig, shape: DecoderShape, plan: LayerPlan, sizes: StateSpace
) -> Mamba2:
    """Returns the Mamba-2 mixer with a norm after its gate."""
    return Mamba2(
        sizes,
        "model.layers.{}.mamba",
        plan.index,
        limits=step_limits(config),
        norm_eps=shape.norm_eps,
        norm_width=sizes.inner // sizes.num_runs,
    )
