"""EuroBERT: Llama's layers with full attention. Boizard et al. 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, LayerCache
from octavo.models.encoder import base_prefix
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.pooled_row import embed_rows
from octavo.models.pooling import is_classifier, num_labels
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.builder import Builder
from octavo.program.program import CacheGroup, Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("tie_word_embeddings", "classifier_pooling", "clf_pooling")
    shape, prefix = DecoderShape.read(config, norm_eps=1e-5), base_prefix(config, "model")
    heads = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
    group = CacheGroup("encoder", "full", shape.num_layers, *heads, one_step=True)
    rope = rope_parameters(config).table(shape.head_dim)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    attend = SelfAttention(
        shape=shape,
        caches=[LayerCache("encoder", i, "full") for i in range(shape.num_layers)],
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        layers=f"{prefix}layers",
        qkv_bias=bias,
        out_bias=bias,
    )
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    b = Builder("encoder", (group,), shape.vocab_size)
    x = b.embedding(b.token_ids(), f"{prefix}embed_tokens", shape.vocab_size, shape.hidden_size)
    for i in range(shape.num_layers):
        layer = f"{prefix}layers.{i}"
        x = b.add(x, attend(b, b.rms_norm(x, f"{layer}.input_layernorm", shape.norm_eps), i))
        rows = b.rms_norm(x, f"{layer}.post_attention_layernorm", shape.norm_eps)
        x = b.add(x, gated_mlp(b, rows, f"{layer}.mlp", width, activation, bias=mlp_bias))
    x = b.rms_norm(x, f"{prefix}norm", shape.norm_eps)
    if is_classifier(config):
        return {"encoder": b.finish(pooled=_classifier(b, x, config))}
    return {"encoder": b.finish(pooled=embed_rows(b, x, config))}


def _classifier(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends the classifier of the first row, the mean row, or all rows, whose scores are
    averaged ("late").
    """
    config.refuse_unless("classifier_pooling", "bos", "mean", "late")
    pooling = config.text("classifier_pooling", "late")
    rows = x if pooling == "late" else b.pool_rows(x, "cls" if pooling == "bos" else "mean")
    rows = b.act(b.linear(rows, "dense", x.width, bias=True), "gelu")
    # The mean of the scores is the score of the mean.
    rows = b.pool_rows(rows, "mean") if pooling == "late" else rows
    return b.linear(rows, "classifier", num_labels(config), bias=True)
