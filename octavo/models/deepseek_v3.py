"""DeepSeek-V3 and R1: multi-head latent attention (MLA), grouped sigmoid routing, shared experts.
DeepSeek-AI 2024.

The multi-token-prediction layer is used as a draft head (`models/draft_heads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape, PredictionLayer, build_decoder
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_experts, gated_mlp
from octavo.models.rope import rope_parameters, yarn_mscale
from octavo.program.builder import Builder
from octavo.program.expert_ops import GroupRank
from octavo.program.ops import RopeTable
from octavo.program.program import CacheGroup, Program, Value, Weight

LATENT_NORM_EPS = 1e-6
"""Epsilon of the latent norm: transformers uses its default value, regardless of rms_norm_eps."""


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("topk_method", "noaux_tc")
    return build_deepseek(config, DeepseekMlp.read(config))


def build_deepseek(config: HfConfig, mlp: DeepseekMlp) -> dict[str, Program]:
    """Builds a decoder with latent attention and DeepSeek's experts."""
    config.refuse_unless("moe_layer_freq", 1)
    config.without_effect("ep_size", "num_nextn_predict_layers", "qk_head_dim")
    shape = DecoderShape.read(config)
    attention = LatentAttention.read(config, shape.num_heads)
    return build_decoder(shape, (attention.group(shape.num_layers),), attention, mlp)


def prediction_layer(config: HfConfig) -> PredictionLayer:
    """Returns the multi-token-prediction layer."""
    shape = DecoderShape.read(config)
    attention = LatentAttention.read(config, shape.num_heads)
    return PredictionLayer.behind_last(
        shape, attention.group(1), attention, DeepseekMlp.read(config)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    num_heads: int
    nope_width: int
    rope_width: int
    v_width: int
    latent_width: int
    q_latent_width: int | None
    rope: RopeTable | None
    """None: keys have no positions."""
    rope_style: Literal["half", "interleaved"]
    scale: float
    bias: bool
    index: Sequence[int] | None = None
    """Index of each layer within the cache group; None: every layer is in it."""

    @staticmethod
    def read(config: HfConfig, num_heads: int, *, has_rope: bool = True) -> LatentAttention:
        nope, rotary = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
        rope = rope_parameters(config) if has_rope else None
        all_dim, temperature = 0.0, 1.0
        if rope is not None and rope.kind != "default":
            all_dim = rope.number("mscale_all_dim", 0.0)
        if rope is not None and all_dim:
            temperature = yarn_mscale(rope.number("factor"), all_dim) ** 2
        return LatentAttention(
            num_heads=num_heads,
            nope_width=nope,
            rope_width=rotary,
            v_width=config.size("v_head_dim", 128),
            latent_width=config.size("kv_lora_rank", 512),
            q_latent_width=_q_latent_width(config),
            rope=None if rope is None else rope.table(rotary),
            rope_style="interleaved" if config.flag("rope_interleave", True) else "half",
            scale=(nope + rotary) ** -0.5 * temperature,
            bias=config.flag("attention_bias", False),
        )

    def group(self, num_layers: int) -> CacheGroup:
        return CacheGroup("latent", "latent", num_layers, 1, self.latent_width + self.rope_width, 0)

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name, at = f"model.layers.{layer}.self_attn", layer
        if self.index is not None:
            at = self.index[layer]
        q_nope, q_rope = self._queries(b, x, name)
        latent = self._part(b, x, f"{name}.kv_a_proj_with_mqa", 0, self.latent_width)
        k_rope = self._part(b, x, f"{name}.kv_a_proj_with_mqa", self.latent_width, self.rope_width)
        latent = b.rms_norm(latent, f"{name}.kv_a_layernorm", LATENT_NORM_EPS)
        if self.rope is not None:
            q_rope = b.rope(q_rope, self.num_heads, self.rope, style=self.rope_style)
            k_rope = b.rope(k_rope, 1, self.rope, style=self.rope_style)
        b.kv_write("latent", at, (latent, k_rope), None)
        kv_b = Weight(
            f"{name}.kv_b_proj.weight",
            (self.num_heads * (self.nope_width + self.v_width), self.latent_width),
        )
        out = b.mla_attention(
            q_nope,
            q_rope,
            kv_b,
            group="latent",
            layer=at,
            num_heads=self.num_heads,
            scale=self.scale,
        )
        return b.linear(out, f"{name}.o_proj", x.width, bias=self.bias)

    def _queries(self, b: Builder, x: Value, name: str) -> tuple[Value, Value]:
        """Returns the non-rotary and rotary parts of all heads' queries, which the checkpoint
        interleaves by head.
        """
        module = f"{name}.q_proj"
        if self.q_latent_width is not None:
            x = b.rms_norm(
                b.linear(x, f"{name}.q_a_proj", self.q_latent_width, bias=self.bias),
                f"{name}.q_a_layernorm",
                LATENT_NORM_EPS,
            )
            module = f"{name}.q_b_proj"
        head = self.nope_width + self.rope_width
        nope, rope = (
            Weight(
                f"{module}.weight",
                (self.num_heads * width, x.width),
                source_rows=self.num_heads * head,
                row_start=start,
                row_step=head,
                row_run=width,
            )
            for start, width in ((0, self.nope_width), (self.nope_width, self.rope_width))
        )
        return b.linear_from(x, nope, name=module), b.linear_from(x, rope, name=module)

    def _part(self, b: Builder, x: Value, module: str, start: int, width: int) -> Value:
        """Returns rows start..start+width-1 of the joint projection of latent and rotary key."""
        total = self.latent_width + self.rope_width
        weight = Weight(f"{module}.weight", (width, x.width), source_rows=total, row_start=start)
        bias = (
            Weight(f"{module}.bias", (width,), source_rows=total, row_start=start)
            if self.bias
            else None
        )
        return b.linear_from(x, weight, bias, name=module)


def _q_latent_width(config: HfConfig) -> int | None:
    """Reads the latent width of queries; None if queries are a single projection."""
    if config.values.get("q_lora_rank") is None:
        return config.get_if_missing("q_lora_rank", 1536)
    return config.size("q_lora_rank")


def count_dense_layers(config: HfConfig, default: int) -> int:
    """Returns the number of first layers without experts, from `mlp_layer_types` if present."""
    types = config.values.get("mlp_layer_types")
    if types is None:
        return default
    num_layers = config.count("num_hidden_layers")
    num_dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise UnsupportedModel(
            f"config.json: mlp_layer_types is {types!r:.80}, expected {num_layers} of dense, then"
            f" sparse"
        )
    return num_dense


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekMlp:
    """DeepSeek's MLPs: dense in the first layers, then routed and shared experts.

    With "sigmoid", a correction bias is added to the scores for choosing experts.
    """

    config: HfConfig
    num_experts: int
    top_k: int
    width: int
    first_routed: int
    scale: float
    score: Literal["softmax", "sigmoid"]
    num_shared: int
    num_groups: int
    top_groups: int
    group_rank: GroupRank
    routed_module: str = "mlp"
    """Module of the experts in layers that have them."""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @staticmethod
    def read(
        config: HfConfig,
        *,
        first_routed: int = 3,
        scale: float = 2.5,
        score: Literal["softmax", "sigmoid"] = "sigmoid",
        num_shared: int = 1,
        groups: tuple[int, int] = (8, 4),
        group_rank: GroupRank = "two_best",
    ) -> DeepseekMlp:
        """Reads the sizes; keyword defaults are the family's."""
        # Without routed layers the first has no effect, without dense layers the second.
        config.without_effect("norm_topk_prob", "intermediate_size")
        return DeepseekMlp(
            config=config,
            num_experts=config.count("n_routed_experts"),
            top_k=config.count("num_experts_per_tok"),
            width=config.size("moe_intermediate_size"),
            first_routed=config.integer("first_k_dense_replace", first_routed),
            scale=config.number("routed_scaling_factor", scale),
            score=score,
            num_shared=config.count("n_shared_experts", num_shared),
            num_groups=config.count("n_group", config.get_if_missing("n_group", groups[0]) or 1),
            top_groups=config.count(
                "topk_group", config.get_if_missing("topk_group", groups[1]) or 1
            ),
            group_rank=group_rank,
        )

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        config, layers = self.config, "model.layers"
        activation = config.activation("hidden_act", "silu")
        if layer < self.first_routed:
            width = config.size("intermediate_size")
            return gated_mlp(b, x, f"{layers}.{layer}.mlp", width, activation)
        name = f"{layers}.{layer}.{self.routed_module}"
        correction = Weight(f"{name}.gate.e_score_correction_bias", (self.num_experts,))
        routed = b.route(
            x,
            b.linear(x, f"{name}.gate", self.num_experts),
            self.top_k,
            score=self.score,
            bias=correction if self.score == "sigmoid" else None,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_rank=self.group_rank,
            normalize=config.flag("norm_topk_prob", True),
            scale=self.scale,
        )
        chosen = gated_experts(
            b,
            routed,
            f"{name}.experts",
            num_experts=self.num_experts,
            width=self.width,
            activation=activation,
            names=self.expert_names,
        )
        shared_width = self.width * self.num_shared
        return b.add(chosen, gated_mlp(b, x, f"{name}.shared_experts", shared_width, activation))
