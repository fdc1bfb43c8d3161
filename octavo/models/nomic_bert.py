"""Nomic BERT: BERT with RoPE, gated MLP and no biases, under its own weight names. Nussbaum et al.
2024.
"""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
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
    for name in ("causal", "mlp_fc2_bias", "parallel_block", "scale_attn_by_inverse_layer_idx"):
        config.refuse_unless(name, False)
    for name in ("rotary_scaling_factor", "rotary_emb_scale_base"):
        config.refuse_unless(name)
    config.refuse_unless("scale_attn_weights", True)
    config.refuse_unless("use_rms_norm", False)
    config.without_effect(
        "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "use_xentropy"
    )
    config.without_effect("max_trained_positions", "pad_vocab_size_multiple")
    config.without_effect("parallel_block_tied_norm")
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
    raise UnsupportedModel("nomic_bert: sequence classifiers are not supported")
