"""gpt-oss: alternating windows, attention sinks, biased experts with a clamped gate. OpenAI 2025.

Checkpoints store all experts in one tensor, `[E, in, out]`, with interleaved gate and up columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.decoder import DecoderShape, build_decoder, plan_cache
from octavo.models.hf_config import HfConfig
from octavo.models.rope import RopeParameters, rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.builder import Builder
from octavo.program.program import Program, Value, Weight

DEFAULT_THETA = 150_000.0
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("hidden_act", "silu")
    config.without_effect("experts_per_token", "initial_context_length")
    shape = DecoderShape.read(config, num_kv_heads=8, head_dim=64, norm_eps=1e-5)
    windows = config.layer_windows(shape.num_layers, config.window(128), lambda i: i % 2 == 0)
    cache = plan_cache(shape, windows)
    bias = config.flag("attention_bias", True)
    num_experts, top_k = config.count("num_local_experts"), config.count("num_experts_per_tok")
    experts = Experts.read(config)

    def mlp(b: Builder, x: Value, i: int) -> Value:
        name = f"model.layers.{i}.mlp"
        logits = b.linear(x, f"{name}.router", num_experts, bias=True)
        routed = b.route(x, logits, top_k, score="softmax_top_k")
        return experts(b, routed, f"{name}.experts")

    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope(config).table(shape.head_dim),) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    return build_decoder(shape, cache.groups, attention, mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Biased experts with clamped gates and inputs."""

    num_experts: int
    width: int
    limit: float
    alpha: float
    separate: bool
    """Whether gate and up are separate tensors (GGUF)."""

    @staticmethod
    def read(config: HfConfig) -> Experts:
        return Experts(
            num_experts=config.count("num_local_experts"),
            width=config.size("intermediate_size"),
            limit=config.number("swiglu_limit", 7.0),
            alpha=config.number("swiglu_alpha", 1.702),
            separate=config.flag("separate_experts", False),
        )

    def __call__(self, b: Builder, routed: tuple[Value, Value, Value], name: str) -> Value:
        rows, ids, weights = routed
        gate, up = (
            b.grouped_linear(rows, ids, *self._opening(name, rows.width, part)) for part in (0, 1)
        )
        h = b.act_mul(gate, up, "silu", clamp=self.limit, alpha=self.alpha, up_offset=1.0)
        return b.combine(b.grouped_linear(h, ids, *self._closing(name, rows.width)), weights)

    def _opening(self, name: str, in_width: int, part: int) -> tuple[Weight, Weight]:
        """Returns weight and bias of gate (`part` 0) or up (1)."""
        if not self.separate:
            gate_up = f"{name}.gate_up_proj"
            return interleaved(gate_up, self.num_experts, self.width, in_width, part=part)
        return self._separate(name, ("gate_proj", "up_proj")[part], self.width, in_width)

    def _closing(self, name: str, width: int) -> tuple[Weight, Weight]:
        if self.separate:
            return self._separate(name, "down_proj", width, self.width)
        shape = (self.num_experts, width, self.width)
        return (
            Weight(f"{name}.down_proj", shape, transposed=True),
            Weight(f"{name}.down_proj_bias", shape[:2], rows_last=True),
        )

    def _separate(self, name: str, part: str, rows: int, columns: int) -> tuple[Weight, Weight]:
        shape = (self.num_experts, rows, columns)
        sources = tuple(f"{name}.{e}.{part}.weight" for e in range(self.num_experts))
        bias = Weight(f"{name}.{part}.bias", shape[:2], rows_last=True)
        return Weight(f"{name}.{part}.weight", shape, sources), bias


def rope(config: HfConfig) -> RopeParameters:
    if config.values.get("rope_parameters") or config.values.get("rope_scaling"):
        return rope_parameters(config, default_theta=DEFAULT_THETA)
    theta = config.number("rope_theta", DEFAULT_THETA)
    return RopeParameters(
        DEFAULT_ROPE,
        theta=theta,
        max_positions=config.integer("max_position_embeddings", 131_072, low=1),
    )


def interleaved(
    name: str, num_experts: int, width: int, in_width: int, *, part: int
) -> tuple[Weight, Weight]:
    """Returns weight and bias of every second output, starting at `part`."""
    shape = (num_experts, width, in_width)
    return (
        Weight(name, shape, transposed=True, source_rows=2 * width, row_start=part, row_step=2),
        Weight(
            f"{name}_bias",
            shape[:2],
            source_rows=2 * width,
            row_start=part,
            row_step=2,
            rows_last=True,
        ),
    )
