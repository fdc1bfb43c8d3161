"""Attention of long prompts and chunks with PyTorch's scaled dot product attention, which selects
cuDNN's kernel for first chunks and FlashAttention's for later ones.

A request's keys and values are gathered from its blocks once per layer, so the kernels read
neighbouring rows: for n keys this copies 2 n K D numbers, beside 2 t n H D products for t rows.
`triton/prefill.py` computes what `gains` rejects, and everything with batch invariance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from octavo.executor.torch.attention.call import AttentionCall

FEWEST_ROWS = 256
"""Mean number of rows per request from which gathering and a launch per request pay off; estimated,
not measured.
"""

MOST_WIDTH = 256
"""Largest head width of the fast kernels."""

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels by priority; the last takes every call, with all scores in memory."""


def gains(call: AttentionCall) -> bool:
    """Returns whether the fast kernels compute this call and its requests have rows enough."""
    spans = call.rows.spans
    num_rows = sum(span.stop - span.start for span in spans)
    window = call.window
    sees_all = window is None or all(span.last_key <= window for span in spans)
    extras = (call.softcap, call.sinks, call.bias, call.limits, call.expand)
    width = call.q.shape[-1]
    return (
        num_rows >= FEWEST_ROWS * len(spans)
        and call.q.dtype in (torch.bfloat16, torch.float16)
        and width == call.v_width <= MOST_WIDTH
        and width % 8 == 0
        and sees_all
        and not call.full
        and all(extra is None for extra in extras)
    )


def attend(call: AttentionCall, out: Tensor) -> None:
    """Writes the rows of requests with several rows into `out [T, H, v_width]`."""
    for span in call.rows.spans:
        rows = slice(span.start, span.stop)
        table = call.block_tables[span.request : span.request + 1, : span.blocks.stop]
        k, v = (
            stored.read(table)[:, : span.last_key].to(call.q.dtype).transpose(1, 2)
            for stored in (call.k, call.v)
        )
        q = call.q[None, rows].transpose(1, 2)
        num_rows = span.stop - span.start
        is_first = num_rows == span.last_key
        with sdpa_kernel(BACKENDS, set_priority=True):
            values = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if is_first else causal_lower_right(num_rows, span.last_key),
                is_causal=is_first,
                scale=call.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        out[rows] = values[0].transpose(0, 1)
