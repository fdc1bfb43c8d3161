"""Mamba 2: a selective state space with one decay per head in every layer. Dao and Gu 2024."""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import build_decoder
from octavo.models.hf_config import HfConfig
from octavo.models.mamba import FRAME, read_shape
from octavo.models.state_space import MAX_TAPS, Mamba2, StateSpace, step_limits
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = read_shape(config, tied=False)
    inner = int(config.positive("expand", 2) * shape.hidden_size)
    num_heads, head_dim = config.size("num_heads", 128), config.size("head_dim", 64)
    num_runs = config.size("n_groups", 8)
    if num_heads * head_dim != inner or num_heads % num_runs:
        raise UnsupportedModel(
            f"config.json: num_heads is {num_heads}, expected expand * hidden_size / head_dim ="
            f" {inner // head_dim}, a multiple of n_groups ({num_runs})"
        )
    sizes = StateSpace(
        inner=inner,
        num_heads=num_heads,
        state_size=config.size("state_size", 128),
        taps=config.integer("conv_kernel", 4, low=1, high=MAX_TAPS),
        activation=config.activation("hidden_act", "silu"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        num_runs=num_runs,
    )
    config.without_effect("chunk_size", "time_step_rank")
    config.refuse_unless("rms_norm", True)
    mixer = Mamba2(
        sizes,
        "backbone.layers.{}.mixer",
        range(shape.num_layers),
        limits=step_limits(config),
        norm_eps=shape.norm_eps,
        norm_width=inner // num_runs,
    )
    groups = sizes.groups(shape.num_layers, sizes.conv_width)
    return build_decoder(shape, groups, mixer, None, FRAME)
