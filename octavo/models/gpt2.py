"""GPT-2: learned positions, LayerNorms, plain MLP. Radford et al. 2019.

Checkpoints store matrices as `[in, out]` and concatenate q, k, v in one tensor.
"""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.pooled_row import pooled_row
from octavo.models.pooling import pooled_head
from octavo.program.builder import Builder
from octavo.program.program import CacheGroup, Program, Value, Weight


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("add_cross_attention", False)
    width = config.size("n_embd")
    num_heads = config.size("n_head")
    num_layers = config.count("n_layer")
    vocab_size = config.integer("vocab_size", low=1)
    if width % num_heads:
        raise UnsupportedModel(
            f"config.json: n_embd {width} is not a multiple of n_head {num_heads}"
        )
    head_dim, eps = width // num_heads, config.number("layer_norm_epsilon", 1e-5)
    activation = config.activation("activation_function", "gelu_new")
    base_scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    b = Builder(
        "decoder",
        (CacheGroup("full", "full", num_layers, num_heads, head_dim, head_dim),),
        vocab_size,
    )
    x = b.embedding(b.token_ids(), "transformer.wte", vocab_size, width)
    x = b.add(
        x, b.position_embedding("transformer.wpe", config.integer("n_positions", low=1), width)
    )
    for i in range(num_layers):
        name = f"transformer.h.{i}"
        h = b.layer_norm(x, f"{name}.ln_1", eps)
        q, k, v = (
            conv1d(b, h, f"{name}.attn.c_attn", width, part=part, num_parts=3) for part in range(3)
        )
        b.kv_write("full", i, (k,), v)
        h = b.attention(
            q,
            "full",
            i,
            num_heads=num_heads,
            scale=base_scale / (i + 1) if by_layer else base_scale,
        )
        x = b.add(x, conv1d(b, h, f"{name}.attn.c_proj", width))
        h = b.layer_norm(x, f"{name}.ln_2", eps)
        h = conv1d(b, h, f"{name}.mlp.c_fc", config.size("n_inner", 4 * width))
        x = b.add(x, conv1d(b, b.act(h, activation), f"{name}.mlp.c_proj", width))
    head, tied = pooled_head(config), config.ties_head(True)
    matrix = "transformer.wte" if tied else "lm_head"

    def norm(rows: Value) -> Value:
        return b.layer_norm(rows, "transformer.ln_f", eps)

    def logit(row: Value, token_id: int) -> Value:
        return linear_part(b, row, matrix, Rows(1, vocab_size, token_id, vocab_size))

    if head is not None:
        return {"decoder": b.finish(pooled=pooled_row(b, x, head, norm, logit))}
    return {"decoder": b.finish(logits=b.linear(norm(b.gather_rows(x)), matrix, vocab_size))}


def conv1d(
    b: Builder, x: Value, name: str, width: int, *, part: int = 0, num_parts: int = 1
) -> Value:
    """Appends a linear stored as `[in, out]`, one of `num_parts` concatenated ones."""
    total, start = (num_parts * width, part * width) if num_parts > 1 else (0, 0)
    weight = Weight(
        f"{name}.weight", (width, x.width), transposed=True, source_rows=total, row_start=start
    )
    bias = Weight(f"{name}.bias", (width,), source_rows=total, row_start=start)
    return b.linear_from(x, weight, bias, name=name)
