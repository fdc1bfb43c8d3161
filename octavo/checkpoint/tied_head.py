"""Tied output layers: whether a checkpoint has a separate one, and the names of tied matrices.

A file may contain a head that differs from the embeddings although its config ties them, like the
published mT5; like transformers 5, the engine then uses the head. Source:
`PreTrainedModel.tie_weights` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

OWN_HEAD = "has_own_head"
"""Key that a checkpoint adds to its config if its output layer differs from the embeddings."""

EMBEDDINGS = (
    *("model.embed_tokens", "transformer.wte", "transformer.word_embeddings", "gpt_neox.embed_in"),
    *("backbone.embeddings", "transformer.embedding.word_embeddings", "model.shared", "shared"),
    *("model.decoder.embed_tokens", "decoder.embed_tokens"),
    *("model.encoder.embed_tokens", "encoder.embed_tokens"),
)
"""Modules of token embeddings."""

HEADS = ("lm_head", "embed_out", "proj_out", "transformer.output_layer")
"""Modules of output layers."""

CHUNK_BYTES = 1 << 22


def other_names(name: str) -> Iterator[str]:
    """Yields other names under which a tied matrix may be stored; nothing for other tensors.

    Files of tied models contain the matrix under one of several names, not always the embeddings'
    name.
    """
    module = name.removesuffix(".weight")
    if module not in (*EMBEDDINGS, *HEADS) or module == name:
        return
    for other in (*EMBEDDINGS, *HEADS):
        if other != module:
            yield f"{other}.weight"


def has_own_head(matrix: Callable[[str], NDArray | None]) -> bool:
    """Returns whether a checkpoint has an output layer with the embeddings' shape but different
    values.

    `matrix` returns the stored values by name, None if missing.
    """
    heads = [found for module in HEADS if (found := matrix(f"{module}.weight")) is not None]
    tables = [found for module in EMBEDDINGS if (found := matrix(f"{module}.weight")) is not None]
    if not heads or not tables or heads[0].shape != tables[0].shape:
        return False
    return not _equal(heads[0], tables[0])


def _equal(first: NDArray, second: NDArray) -> bool:
    """Compares two matrices in chunks and stops at the first difference."""
    rows = max(CHUNK_BYTES // max(first[:1].nbytes, 1), 1)
    return all(
        np.array_equal(
            first[start : start + rows].astype(np.float32),
            second[start : start + rows].astype(np.float32),
        )
        for start in range(0, len(first), rows)
    )
