"""Kimi Linear: Kimi Delta Attention (a gated delta rule whose decay differs by key column), and
DeepSeek's latent attention without positions in every fourth layer; sigmoid-routed experts.

Kimi Team 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, build_decoder
from octavo.models.deepseek_v3 import DeepseekMlp, LatentAttention, count_dense_layers
from octavo.models.gated_delta import unit_rows
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import LayerPlan, layers_by_type
from octavo.models.state_space import CONV, MAX_TAPS, STATE
from octavo.program.build_mixers import delta_scan, short_conv
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import CacheGroup, Program, Value, Weight

NAMES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
"""This family's names of DeepSeek's keys."""
NUM_CONVOLUTIONS = 3
"""Convolutions of a layer: of q, k and v."""


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("mla_use_nope", True)
    config.refuse_unless("moe_router_activation_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    config.refuse_unless("use_grouped_topk", True)
    config.refuse_unless("moe_layer_freq", 1)
    config.without_effect("num_nextn_predict_layers", "head_dim", "qk_head_dim")
    config.without_effect("rope_theta", "rope_scaling", "rope_parameters")
    config = config.renamed(**NAMES)
    num_dense = count_dense_layers(config, config.integer("first_k_dense_replace", 1))
    config = config.with_values(
        first_k_dense_replace=num_dense, head_dim=None, q_lora_rank=config.values.get("q_lora_rank")
    )
    shape = DecoderShape.read(config, norm_eps=1e-5)
    plan = _read_plan(config, shape.num_layers)
    attention = LatentAttention.read(config, shape.num_heads, has_rope=False)
    attention = replace(attention, index=[cache.layer for cache in plan.caches])
    mlp = DeepseekMlp.read(config, scale=2.446, groups=(1, 1))
    mlp = replace(mlp, routed_module="block_sparse_moe", expert_names=("w1", "w3", "w2"))
    mixer = KimiDelta.read(config, plan, shape.norm_eps)
    groups = mixer.groups(sum(plan.recurs)) if any(plan.recurs) else ()
    if any(plan.attends):
        groups = (attention.group(sum(plan.attends)), *groups)
    return build_decoder(shape, groups, plan.mix(attention, mixer), mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta:
    """The mixer: q, k, v = f(conv(in(rows))); out(norm(scan(v, k / |k|, q / |q|)) * sigmoid(gate)).

    Decay and gate are matmuls of rank `dim`.
    """

    num_heads: int
    dim: int
    """Columns of a head of q, k and v."""
    taps: int
    activation: Activation
    norm_eps: float
    index: Sequence[int]
    """Index of each layer within the cache groups."""

    @staticmethod
    def read(config: HfConfig, plan: LayerPlan, norm_eps: float) -> KimiDelta:
        sizes = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
        own = HfConfig({"model_type": config.model_type, **config.table("linear_attn_config")})
        names = ("head_dim", "num_heads", "short_conv_kernel_size")
        dim, num_heads, taps = (
            own.integer(name, config.integer(usual, default), low=1)
            for name, (usual, default) in zip(names, sizes.items(), strict=True)
        )
        if taps > MAX_TAPS:
            raise UnsupportedModel(
                f"config.json: short_conv_kernel_size is {taps}, expected at most {MAX_TAPS}"
            )
        return KimiDelta(
            num_heads=num_heads,
            dim=dim,
            taps=taps,
            activation=config.activation("hidden_act", "silu"),
            norm_eps=norm_eps,
            index=plan.index,
        )

    @property
    def width(self) -> int:
        return self.num_heads * self.dim

    def groups(self, num_layers: int) -> tuple[CacheGroup, CacheGroup]:
        num_convolutions = NUM_CONVOLUTIONS * num_layers
        return (
            CacheGroup(CONV, "conv", num_convolutions, 1, self.width, 0, window=self.taps),
            CacheGroup(STATE, "state", num_layers, self.num_heads, self.dim, self.dim),
        )

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name, at = f"model.layers.{layer}.self_attn", self.index[layer]
        q, k, v = (
            self._convolve(b, x, f"{name}.{part}", NUM_CONVOLUTIONS * at + number)
            for number, part in enumerate("qkv")
        )
        dt = self._by_rank(b, x, f"{name}.f")
        beta = b.act(b.linear(x, f"{name}.b_proj", self.num_heads), "sigmoid")
        k = b.scale(unit_rows(b, k, f"{name}.k", self.dim), self.dim**-0.5)
        q = b.scale(unit_rows(b, q, f"{name}.q", self.dim), 1 / self.dim)
        rate = Weight(f"{name}.A_log", (self.num_heads,), kernel=(1, 1, self.num_heads, 1))
        scanned = delta_scan(
            b, (v, dt, k, q, beta), name, STATE, at, state_size=self.dim, a_log=rate
        )
        normed = b.rms_norm(scanned, f"{name}.o_norm", self.norm_eps, group_width=self.dim)
        gated = b.act_mul(self._by_rank(b, x, f"{name}.g"), normed, "sigmoid")
        return b.linear(gated, f"{name}.o_proj", x.width)

    def _convolve(self, b: Builder, x: Value, name: str, at: int) -> Value:
        rows = b.linear(x, f"{name}_proj", self.width)
        (out,) = short_conv(b, rows, f"{name}_conv1d", CONV, at, activation=self.activation)
        return out

    def _by_rank(self, b: Builder, x: Value, name: str) -> Value:
        return b.linear(b.linear(x, f"{name}_a_proj", self.dim), f"{name}_b_proj", self.width)


def _read_plan(config: HfConfig, num_layers: int) -> LayerPlan:
    """Reads which layers have attention: from layer_types, or from lists of numbers from 1."""
    given, table = layers_by_type(config, num_layers), config.table("linear_attn_config")
    if given is not None:
        return given
    lists = [table.get(name) for name in ("full_attn_layers", "kda_layers")]
    if lists == [None, None]:
        attends = [layer > 0 and layer % 4 == 0 for layer in range(num_layers)]
        return LayerPlan(attends, [not attend for attend in attends])
    full, recurrent = (set(each) if isinstance(each, list) else set() for each in lists)
    if full & recurrent or full | recurrent != set(range(1, num_layers + 1)):
        raise UnsupportedModel(
            f"config.json: linear_attn_config has the layers {sorted(full)} and"
            f" {sorted(recurrent)}, expected 1 to {num_layers}, each once"
        )
    layers = range(1, num_layers + 1)
    return LayerPlan([each in full for each in layers], [each in recurrent for each in layers])
