"""GPT-J: parallel attention and MLP after one LayerNorm, interleaved partial RoPE. Wang and
Komatsuzaki 2021.
"""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
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
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.program import Program

LAYERS = "transformer.h"


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    config.refuse_unless("rotary", True)
    config.refuse_unless("scale_attn_weights", True)
    shape = DecoderShape.read(config, norm_eps=1e-5, eps_name="layer_norm_epsilon")
    cache = plan_cache(shape, (None,) * shape.num_layers)
    turned = config.size("rotary_dim", 64)
    if turned > shape.head_dim:
        raise UnsupportedModel(
            f"config.json: rotary_dim is {turned}, expected at most {shape.head_dim}, the head size"
        )
    width = config.size("n_inner", 4 * shape.hidden_size)
    activation = config.activation("activation_function", "gelu_new")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope_parameters(config).table(turned),) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        module="attn",
        out="out_proj",
        layers=LAYERS,
        rope_style="interleaved",
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b, x, f"{LAYERS}.{i}.mlp", width, activation, names=("fc_in", "fc_out")
        ),
        Frame(
            norms=NormNames("ln_1", None),
            norm=layer_norm(shape.norm_eps),
            embedding="transformer.wte",
            layers=LAYERS,
            final_norm="transformer.ln_f",
            head_bias=True,
            parallel=True,
        ),
    )
