"""OPT: learned positions, LayerNorms, a relu MLP. Zhang et al. 2022."""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
    build_decoder,
    layer_norm,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.models.self_attention import SelfAttention
from octavo.program.program import Program

EPS = 1e-5
"""Epsilon of every LayerNorm; not in the config."""


LAYERS = "model.decoder.layers"

POSITION_OFFSET = 2
"""Number of table rows before the row of position 0."""


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, tied=True)
    norms_first = config.flag("do_layer_norm_before", True)
    has_final_norm = norms_first and not config.flag("_remove_final_layer_norm", False)
    width_of_words = config.size("word_embed_proj_dim", shape.hidden_size)
    cache = plan_cache(shape, (None,) * shape.num_layers)
    bias = config.flag("enable_bias", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    width = config.size("ffn_dim")
    activation = config.activation("activation_function", "relu")
    num_positions = config.integer("max_position_embeddings", low=1) + POSITION_OFFSET
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(None,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        out="out_proj",
        layers=LAYERS,
        qkv_bias=bias,
        out_bias=bias,
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(b, x, f"{LAYERS}.{i}", width, activation, bias=bias),
        Frame(
            norms=NormNames("self_attn_layer_norm", "final_layer_norm"),
            norm=layer_norm(EPS, bias=affine, weight=affine),
            embedding="model.decoder.embed_tokens",
            layers=LAYERS,
            final_norm="model.decoder.final_layer_norm" if has_final_norm else None,
            projected_width=None if width_of_words == shape.hidden_size else width_of_words,
            projections=("model.decoder.project_in", "model.decoder.project_out"),
            norms_sums=not norms_first,
            positions=lambda b: b.position_embedding(
                "model.decoder.embed_positions",
                num_positions,
                shape.hidden_size,
                offset=POSITION_OFFSET,
            ),
        ),
    )
