"""Mamba: a selective state space in every layer, no attention. Gu and Dao 2023."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Frame, NormNames, build_decoder
from octavo.models.hf_config import HfConfig
from octavo.models.state_space import MAX_TAPS, Mamba1, StateSpace
from octavo.program.program import Program

FRAME = Frame(
    norms=NormNames("norm", None),
    embedding="backbone.embeddings",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
)


def build(config: HfConfig) -> dict[str, Program]:
    shape = read_shape(config, tied=True)
    inner = config.size("intermediate_size", int(config.positive("expand", 2) * shape.hidden_size))
    sizes = StateSpace(
        inner=inner,
        num_heads=inner,
        state_size=config.size("state_size", 16),
        taps=config.integer("conv_kernel", 4, low=1, high=MAX_TAPS),
        activation=config.activation("hidden_act", "silu"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
    )
    rank = -(-shape.hidden_size // 16)
    if config.values.get("time_step_rank") not in (None, "auto"):
        rank = config.size("time_step_rank")
    config.without_effect("use_mambapy", "use_associative_scan")
    mixer = Mamba1(sizes, rank, "backbone.layers.{}.mixer", range(shape.num_layers))
    return build_decoder(shape, sizes.groups(shape.num_layers, inner), mixer, None, FRAME)


def read_shape(config: HfConfig, *, tied: bool) -> DecoderShape:
    """Reads the shape of a decoder without attention."""
    config.without_effect(
        *("residual_in_fp32", "rescale_prenorm_residual", "layer_types", "time_step_scale"),
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"),
    )
    return DecoderShape(
        vocab_size=config.integer("vocab_size", low=1),
        hidden_size=config.size("hidden_size"),
        num_layers=config.count("num_hidden_layers"),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied=config.ties_head(tied),
    )
