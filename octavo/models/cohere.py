"""Command R: parallel attention and MLP after one LayerNorm without bias, interleaved RoPE, scaled
logits. Cohere 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.decoder import DecoderShape, Frame, NormNames, layer_norm
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import rope_parameters
from octavo.program.ops import RopeTable
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = read_shape(config)
    rope = rope_parameters(config, default_theta=500_000.0).table(shape.head_dim)
    return build_cohere(config, shape, (None,) * shape.num_layers, (rope,) * shape.num_layers)


def read_shape(config: HfConfig) -> DecoderShape:
    return DecoderShape.read(config, norm_eps=1e-5, eps_name="layer_norm_eps", tied=True)


def build_cohere(
    config: HfConfig,
    shape: DecoderShape,
    windows: Sequence[int | None],
    ropes: Sequence[RopeTable | None],
) -> dict[str, Program]:
    """Builds the decoder of Command R and Command R7B."""
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=shape,
        windows=windows,
        ropes=ropes,
        qkv_bias=bias,
        out_bias=bias,
        interleaved=True,
        own_norms="one tensor" if config.flag("use_qk_norm", False) else "",
        frame=Frame(
            norms=NormNames(before_mlp=None),
            norm=layer_norm(shape.norm_eps, bias=False),
            parallel=True,
            logit_scale=config.number("logit_scale", 0.0625),
        ),
    )
