"""ModernBERT: a pre-norm encoder with RoPE, gated MLPs, and bidirectional windows in two of three
layers. Warner et al. 2024.
"""

from __future__ import annotations

from octavo.models.encoder import EncoderShape, base_prefix
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.pooled_row import embed_rows
from octavo.models.pooling import RowPooling, is_classifier, is_token_classifier, num_labels
from octavo.models.rope import tables_by_layer_type
from octavo.program.builder import Builder
from octavo.program.ops import NearBias
from octavo.program.program import CacheGroup, Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    eps = config.number("norm_eps", 1e-5)
    shape = EncoderShape.read(config.with_values(layer_norm_eps=eps))
    config.without_effect(
        *("layer_norm_eps", "decoder_bias", "deterministic_flash_attn", "reference_compile"),
        *("repad_logits_with_grad", "sparse_pred_ignore_index", "classifier_bias"),
        "classifier_pooling",
    )
    tables = tables_by_layer_type(
        config,
        shape.head_dim,
        sliding_theta=config.number("local_rope_theta", 10_000.0),
        full_theta=config.number("global_rope_theta", 160_000.0),
        scales_both=True,
    )
    every = config.integer("global_attn_every_n_layers", 3, low=1)
    near = NearBias(config.integer("local_attention", 128, low=2) // 2)
    windows = config.layer_windows(shape.num_layers, near.reach, lambda i: i % every != 0)
    norm_bias, bias = config.flag("norm_bias", False), config.flag("attention_bias", False)
    mlp_bias, width = config.flag("mlp_bias", False), config.size("intermediate_size")
    activation = config.activation("hidden_activation", "gelu")
    prefix, hidden = base_prefix(config, "model"), shape.hidden_size
    heads = (shape.num_heads, shape.head_dim, shape.head_dim)
    group = CacheGroup("encoder", "full", shape.num_layers, *heads, one_step=True)
    b = Builder("encoder", (group,), shape.vocab_size)

    def norm(rows: Value, name: str) -> Value:
        return b.layer_norm(rows, name, shape.norm_eps, bias=norm_bias)

    def attend(rows: Value, name: str, i: int) -> Value:
        slides = windows[i] is not None
        q, k, v = (
            linear_part(b, rows, f"{name}.Wqkv", Rows(hidden, 3 * hidden, start), bias=bias)
            for start in (0, hidden, 2 * hidden)
        )
        q, k = (b.rope(part, shape.num_heads, tables[0 if slides else 1]) for part in (q, k))
        b.kv_write("encoder", i, (k,), v)
        attended = b.attention(
            q,
            "encoder",
            i,
            num_heads=shape.num_heads,
            scale=shape.head_dim**-0.5,
            mask="full",
            bias=near if slides else None,
        )
        return b.linear(attended, f"{name}.Wo", hidden, bias=bias)

    def mlp(rows: Value, name: str) -> Value:
        inner, gate = (
            linear_part(b, rows, f"{name}.Wi", Rows(width, 2 * width, start), bias=mlp_bias)
            for start in (0, width)
        )
        return b.linear(b.act_mul(inner, gate, activation), f"{name}.Wo", hidden, bias=mlp_bias)

    x = b.embedding(b.token_ids(), f"{prefix}embeddings.tok_embeddings", shape.vocab_size, hidden)
    x = norm(x, f"{prefix}embeddings.norm")
    for i in range(shape.num_layers):
        layer = f"{prefix}layers.{i}"
        rows = norm(x, f"{layer}.attn_norm") if i else x
        x = b.add(x, attend(rows, f"{layer}.attn", i))
        x = b.add(x, mlp(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp"))
    x = norm(x, f"{prefix}final_norm")
    of_tokens = is_token_classifier(config)
    if not of_tokens and not is_classifier(config):
        return {"encoder": b.finish(pooled=embed_rows(b, x, config))}
    rows = b.gather_rows(x) if of_tokens else b.pool_rows(x, _classifier_pooling(config))
    dense_bias = config.flag("classifier_bias", False)
    dense = b.linear(rows, "head.dense", hidden, bias=dense_bias)
    head = norm(b.act(dense, config.activation("classifier_activation", "gelu")), "head.norm")
    return {"encoder": b.finish(pooled=b.linear(head, "classifier", num_labels(config), bias=True))}


def _classifier_pooling(config: HfConfig) -> RowPooling:
    config.refuse_unless("classifier_pooling", "cls", "mean")
    return "mean" if config.text("classifier_pooling", "cls") == "mean" else "cls"
