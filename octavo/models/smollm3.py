"""SmolLM3: Llama without RoPE in every fourth layer. Hugging Face 2025."""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=4, tied=True)
    rope = rope_parameters(config, default_theta=2_000_000.0).table(shape.head_dim)
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=shape,
        windows=get_windows(config, shape.num_layers),
        ropes=[rope if turned else None for turned in layers_with_rope(config, shape.num_layers)],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def layers_with_rope(config: HfConfig, num_layers: int) -> list[bool]:
    """Returns for each layer whether it has RoPE; in `no_rope_layers`, 1 means with RoPE."""
    given = config.integers("no_rope_layers")
    if given and len(given) != num_layers:
        raise UnsupportedModel(
            f"config.json: no_rope_layers has {len(given)} entries, expected one for each of"
            f" {num_layers} layers"
        )
    interval = config.integer("no_rope_layer_interval", 4, low=1)
    return [bool(flag) for flag in given] or [(i + 1) % interval != 0 for i in range(num_layers)]


def get_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Returns the layers' windows; layers without RoPE use full attention."""
    config.without_effect("layer_types", "max_window_layers", "sliding_window")
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    with_rope = layers_with_rope(config, num_layers)
    window = config.optional_integer("sliding_window")
    return config.layer_windows(num_layers, window, lambda i: with_rope[i])
