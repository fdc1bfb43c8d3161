"""Hunyuan MoE: Hunyuan's attention, softmax-routed experts and a shared MLP in every layer. Tencent
2025.
"""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.hunyuan_v1_dense import build_hunyuan
from octavo.models.mlps import gated_experts, gated_mlp
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    width = config.size("intermediate_size")
    for name, wanted in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if config.values.get(name) is not None and _of_layers(config, name, wanted) != wanted:
            config.refuse_unless(name, wanted)
    num_experts = _of_layers(config, "num_experts", 1)
    top_k = _of_layers(config, "moe_topk", 1)
    activation = config.activation("hidden_act", "silu")

    def mlp(b: Builder, x: Value, i: int) -> Value:
        name = f"model.layers.{i}.mlp"
        chosen = gated_experts(
            b,
            b.route(x, b.linear(x, f"{name}.gate.wg", num_experts), top_k, normalize=True),
            f"{name}.experts",
            num_experts=num_experts,
            width=width,
            activation=activation,
        )
        return b.add(chosen, gated_mlp(b, x, f"{name}.shared_mlp", width, activation))

    return build_hunyuan(config, mlp)


def _of_layers(config: HfConfig, name: str, default: int) -> int:
    """Reads a number that is the same in all layers, or a list of it."""
    numbers = set(config.integers(name)) or {default}
    if len(numbers) > 1:
        raise UnsupportedModel(
            f"config.json: {name} differs between layers, expected one number for all"
        )
    return HfConfig({name: numbers.pop(), "model_type": config.model_type}).count(name)
