"""DistilBERT: half of BERT's layers, no segments. Sanh et al. 2019."""

from __future__ import annotations

from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    build_encoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(hidden_size="dim", num_hidden_layers="n_layers")
    config = config.renamed(num_attention_heads="n_heads")
    config.without_effect("intermediate_size", "sinusoidal_pos_embds", "tie_weights_")
    width, activation = config.size("hidden_dim"), config.activation("activation", "gelu")

    def classifier(b: Builder, x: Value, num: int) -> Value:
        hidden = b.linear(b.pool_rows(x, "cls"), "pre_classifier", x.width, bias=True)
        return b.linear(b.act(hidden, "relu"), "classifier", num, bias=True)

    return build_encoder(
        config,
        EncoderShape.read(config),
        names=EncoderNames(
            prefix=base_prefix(config, "distilbert"),
            layers="transformer.layer",
            query="attention.q_lin",
            key="attention.k_lin",
            value="attention.v_lin",
            attention_out="attention.out_lin",
            attention_norm="sa_layer_norm",
            mlp_norm="output_layer_norm",
        ),
        positions=Positions(num_rows=config.integer("max_position_embeddings", 512, low=1)),
        mlp=lambda b, x, layer: plain_mlp(
            b, x, f"{layer}.ffn", width, activation, names=("lin1", "lin2")
        ),
        classifier=classifier,
    )
