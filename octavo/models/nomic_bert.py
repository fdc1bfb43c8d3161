"""Nomic BERT: BERT with rope and a gated MLP, without biases, under its own checkpoints' names.
Nussbaum et al. 2024.
"""

from __future__ import annotations

from octavo.errors import UnsupportedModel
from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    build_encoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.rope import rope_parameters
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(hidden_size="n_embd", num_hidden_layers="n_layer", hidden_act="act_fn")
    config = config.renamed(num_attention_heads="n_head", intermediate_size="n_inner")
    config = config.renamed(
        max_position_embeddings="n_positions",
        layer_norm_eps="layer_norm_epsilon",
        rope_theta="rotary_emb_base",
    )
    for name, allowed in (("prenorm", False), ("qkv_proj_bias", False), ("mlp_fc1_bias", False)):
        config.refuse_unless(name, allowed)
    config.refuse_unless("activation_function", "swiglu")
    config.refuse_unless("rotary_emb_fraction", 1, 1.0)
    config.refuse_unless("rotary_emb_interleaved", False)
    shape = EncoderShape.read(config)
    config.refuse_unless("head_dim", shape.head_dim)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")

    def mlp(b: Builder, x: Value, layer: str) -> Value:
        up, gate = (b.linear(x, f"{layer}.mlp.{name}", width) for name in ("fc11", "fc12"))
        return b.linear(b.act_mul(gate, up, activation), f"{layer}.mlp.fc2", x.width)

    return build_encoder(
        config,
        shape,
        names=EncoderNames(
            prefix=base_prefix(config, "bert"),
            layers="encoder.layers",
            stacked="attn.Wqkv",
            attention_out="attn.out_proj",
            attention_norm="norm1",
            mlp_norm="norm2",
            embedding_norm="emb_ln",
        ),
        positions=Positions(
            offset=None,
            num_segments=config.integer("type_vocab_size", 2),
            rope=rope_parameters(config, default_theta=1000.0).table(shape.head_dim),
        ),
        mlp=mlp,
        classifier=_no_classifier,
        bias=False,
    )


def _no_classifier(b: Builder, x: Value, num: int) -> Value:
    raise UnsupportedModel("nomic_bert: sequence classifiers are not supported, embedders are")
