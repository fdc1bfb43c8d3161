"""Maps the names of single experts' matrices to the fused tensors of newer transformers.

These store a layer's experts in two tensors, `gate_up_proj [E, 2 * width, in]` with gates first and
`down_proj [E, in, width]`, under new module names. Source: transformers' `conversion_mapping.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_TENSORS = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}


_RENAMED = (
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.router."),
    (".mlp.moe_statics.", ".mlp.gate.moe_statics."),
    *((f".mlp.{part}_proj.", f".block_sparse_moe.{part}_proj.") for part in ("gate", "up", "down")),
    ("embed_out.", "lm_head."),
)
"""Old and new substrings of names."""


class FusedPart(NamedTuple):
    """An expert's matrix within a fused tensor."""

    tensor: str
    expert: int
    half: int | None
    """Half of the expert's rows, 0 or 1; None: all rows."""

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the first row and the number of rows in the tensor viewed as `[E * rows, in]`;
        None if `shape`, `[E, rows, in]`, does not contain the part.
        """
        if len(shape) != 3 or self.expert >= shape[0] or (self.half is not None and shape[1] % 2):
            return None
        count = shape[1] if self.half is None else shape[1] // 2
        return self.expert * shape[1] + (self.half or 0) * count, count


def fused_parts(name: str) -> Iterator[FusedPart]:
    """Yields the candidate locations of an expert's matrix in newer checkpoints; nothing for other
    names.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return
    tensor, half = _TENSORS[match[3]]
    module, expert = _newer(match[1]), int(match[2])
    yield FusedPart(f"{module}.{tensor}", expert, half)
    if half is not None:
        yield FusedPart(f"{module}.{match[3]}", expert, None)  # experts without gates


def newer_names(name: str) -> Iterator[str]:
    """Yields a tensor's names in newer checkpoints, if they differ."""
    for older, newer in _RENAMED:
        if older in name:
            yield name.replace(older, newer)
    if _newer(name) != name:
        yield _newer(name)
        yield _newer(name).replace(".mlp.gate.", ".mlp.router.")


def _newer(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.").replace("backbone.", "model.")
