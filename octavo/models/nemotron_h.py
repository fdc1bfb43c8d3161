"""Nemotron-H: each layer is a Mamba-2 mixer, attention, an MLP or routed experts. NVIDIA 2025."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
    Sublayer,
    build_decoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.hybrid import LayerPlan, self_attention
from octavo.models.mlps import plain_mlp
from octavo.models.state_space import MAX_TAPS, Mamba2, StateSpace, step_limits
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import Program, Value, Weight

LAYERS = "backbone.layers"
FRAME = Frame(
    norms=NormNames("norm", None),
    embedding="backbone.embeddings",
    layers=LAYERS,
    final_norm="backbone.norm_f",
)
KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Layer kind by letter in hybrid_override_pattern."""
OTHER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Layer kind by name in newer configs."""


def build(config: HfConfig) -> dict[str, Program]:
    kinds = layer_kinds(config)
    named = config.renamed(
        conv_kernel="mamba_d_conv", n_groups="mamba_n_groups", use_conv_bias="mamba_conv_bias"
    ).with_values(num_hidden_layers=len(kinds))
    shape = DecoderShape.read(
        named, head_dim=128, num_kv_heads=8, norm_eps=1e-5, eps_name="layer_norm_epsilon"
    )
    plan = LayerPlan([kind == "attention" for kind in kinds], [kind == "mamba" for kind in kinds])
    sizes = _sizes(named)
    parts: dict[str, Sublayer | None] = {
        "mamba": Mamba2(
            sizes,
            LAYERS + ".{}.mixer",
            plan.index,
            limits=step_limits(config),
            norm_eps=shape.norm_eps,
            norm_width=sizes.inner // sizes.num_runs,
        ),
        "attention": self_attention(
            config, shape, plan, None, shape.head_dim**-0.5, layers=LAYERS, module="mixer"
        ),
        "mlp": _Mlp.read(config),
        "moe": _Experts.read(config) if "moe" in kinds else None,
    }
    config.without_effect(
        *("residual_in_fp32", "rescale_prenorm_residual", "chunk_size", "mamba_chunk_size"),
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "expand"),
        *("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    )
    config.without_effect(
        *("num_logits_to_keep", "num_nextn_predict_layers", "mtp_layers_block_type"),
        *("mamba_proj_bias", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor"),
        *("n_group", "topk_group", "norm_topk_prob", "num_hidden_layers", "rope_theta"),
    )
    config.without_effect("sliding_window")  # its attention has no window

    def mix(b: Builder, x: Value, layer: int) -> Value:
        part = parts[kinds[layer]]
        assert part is not None, "every kind that a layer has is read"
        return part(b, x, layer)

    return build_decoder(shape, plan.groups(shape, sizes, sizes.conv_width), mix, None, FRAME)


def layer_kinds(config: HfConfig) -> Sequence[str]:
    """Reads the kind of each layer from a list of names or a pattern of letters."""
    given = config.values.get("layers_block_type") or config.values.get("layer_types")
    pattern = config.values.get("hybrid_override_pattern")
    if given is None and isinstance(pattern, str):
        given = [KINDS.get(letter, letter) for letter in pattern]
    names = given if isinstance(given, list) else []
    kinds = [OTHER_NAMES.get(str(kind), str(kind)) for kind in names]
    if not kinds or not {*KINDS.values()}.issuperset(kinds):
        raise UnsupportedModel(
            f"config.json: layers_block_type is {given!r}, expected a list with entries"
            f" from {', '.join([*KINDS.values(), *OTHER_NAMES])}"
        )
    return kinds


def _sizes(config: HfConfig) -> StateSpace:
    num_heads, width = config.size("mamba_num_heads", 128), config.size("mamba_head_dim", 64)
    num_runs = config.size("n_groups", 8)
    if num_heads % num_runs:
        raise UnsupportedModel(
            f"config.json: mamba_num_heads is {num_heads}, expected a multiple of n_groups"
            f" ({num_runs})"
        )
    return StateSpace(
        inner=num_heads * width,
        num_heads=num_heads,
        state_size=config.size("ssm_state_size", 128),
        taps=config.integer("conv_kernel", 4, low=1, high=MAX_TAPS),
        activation=config.activation("mamba_hidden_act", "silu"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        num_runs=num_runs,
    )


@dataclass(frozen=True, slots=True)
class _Mlp:
    width: int
    activation: Activation
    bias: bool

    @staticmethod
    def read(config: HfConfig, name: str = "intermediate_size") -> _Mlp:
        return _Mlp(
            config.size(name),
            config.activation("mlp_hidden_act", "relu2"),
            config.flag("mlp_bias", False),
        )

    def __call__(self, b: Builder, x: Value, layer: int, module: str = "mixer") -> Value:
        return plain_mlp(
            b,
            x,
            f"{LAYERS}.{layer}.{module}",
            self.width,
            self.activation,
            names=("up_proj", "down_proj"),
            bias=self.bias,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """Routed experts without gates, and a shared expert."""

    shared: _Mlp
    num_experts: int
    top_k: int
    width: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float

    @staticmethod
    def read(config: HfConfig) -> _Experts:
        config.refuse_unless("moe_latent_size", None)
        config.refuse_unless("n_shared_experts", 1)
        return _Experts(
            shared=_Mlp.read(config, "moe_shared_expert_intermediate_size"),
            num_experts=config.count("n_routed_experts", 8),
            top_k=config.count("num_experts_per_tok", 2),
            width=config.size("moe_intermediate_size"),
            num_groups=config.count("n_group", 1),
            top_groups=config.count("topk_group", 1),
            normalize=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
        )

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        name = f"{LAYERS}.{layer}.mixer"
        rows, ids, weights = b.route(
            x,
            b.linear(x, f"{name}.gate", self.num_experts),
            self.top_k,
            score="sigmoid",
            bias=Weight(f"{name}.gate.e_score_correction_bias", (self.num_experts,)),
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            normalize=self.normalize,
            scale=self.scale,
        )
        up = self._weight(f"{name}.experts", "up_proj", self.width, x.width)
        down = self._weight(f"{name}.experts", "down_proj", x.width, self.width)
        inner = b.act(b.grouped_linear(rows, ids, up), self.shared.activation)
        routed = b.combine(b.grouped_linear(inner, ids, down), weights)
        return b.add(routed, self.shared(b, x, layer, "mixer.shared_experts"))

    def _weight(self, name: str, projection: str, rows: int, columns: int) -> Weight:
        sources = tuple(f"{name}.{e}.{projection}.weight" for e in range(self.num_experts))
        return Weight(f"{name}.{projection}.weight", (self.num_experts, rows, columns), sources)
