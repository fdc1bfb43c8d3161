"""GPT-NeoX and Pythia: parallel attention and MLP with separate norms, RoPE on a quarter of each
head. Black et al. 2022; Biderman et al. 2023.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    build_decoder,
    layer_norm,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention, grouped_qkv
from octavo.program.program import Program

LAYERS = "gpt_neox.layers"


def build(config: HfConfig) -> dict[str, Program]:
    renamed = config.renamed(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    shape = DecoderShape.read(config, norm_eps=1e-5, eps_name="layer_norm_eps")
    cache = plan_cache(shape, (None,) * shape.num_layers)
    rope = rope_parameters(renamed, partial=0.25).table(shape.head_dim)
    bias = config.flag("attention_bias", True)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "gelu")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        project=grouped_qkv(shape, "query_key_value", bias=bias),
        module="attention",
        out="dense",
        layers=LAYERS,
        out_bias=bias,
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b, x, f"{LAYERS}.{i}.mlp", width, activation, names=("dense_h_to_4h", "dense_4h_to_h")
        ),
        Frame(
            norm=layer_norm(shape.norm_eps),
            embedding="gpt_neox.embed_in",
            layers=LAYERS,
            final_norm="gpt_neox.final_layer_norm",
            head="embed_out",
            parallel=config.flag("use_parallel_residual", True),
        ),
    )
