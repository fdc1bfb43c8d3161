"""Jina embeddings v3: XLM-RoBERTa with RoPE, under the names of its first release, without task
adapters. Sturua et al. 2024.
"""

from __future__ import annotations

from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    build_encoder,
    roberta_classifier,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = EncoderShape.read(config, norm_eps=1e-5)
    config.refuse_unless("head_dim", shape.head_dim)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "gelu")
    return build_encoder(
        config,
        shape,
        names=EncoderNames(
            prefix=base_prefix(config, "roberta"),
            layers="encoder.layers",
            stacked="mixer.Wqkv",
            attention_out="mixer.out_proj",
            attention_norm="norm1",
            mlp_norm="norm2",
            embedding_norm="emb_ln",
        ),
        positions=Positions(
            offset=None,
            num_segments=config.integer("type_vocab_size", 1),
            rope=rope_parameters(config, default_theta=20_000.0).table(shape.head_dim),
        ),
        mlp=lambda b, x, layer: plain_mlp(b, x, f"{layer}.mlp", width, activation),
        classifier=roberta_classifier,
    )
