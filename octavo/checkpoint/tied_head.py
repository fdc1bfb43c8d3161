"""Output layers beside embeddings that the config ties: whether they have numbers of their own, and
by which names a tied matrix may be stored.

Knows names and bytes only. A file may hold a head that differs although its config ties both, as
mT5's published ones do; transformers 5 then computes with the head, and so does the engine. Source:
`PreTrainedModel.tie_weights` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

OWN_HEAD = "has_own_head"
"""Key that a checkpoint adds to its config where its output layer differs from the embeddings."""

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
    """Yields the names under which a tied matrix may be stored in place of its own; none for other
    tensors. Files of tied models keep one name of several, and not always the embeddings'.
    """
    module = name.removesuffix(".weight")
    if module not in (*EMBEDDINGS, *HEADS) or module == name:
        return
    for other in (*EMBEDDINGS, *HEADS):
        if other != module:
            yield f"{other}.weight"


def has_own_head(matrix: Callable[[str], NDArray | None]) -> bool:
    """Returns whether a checkpoint has an output layer of the embeddings' shape and other numbers.
    `matrix` gives the stored numbers of a name, None where there are none.
    """
    heads = [found for module in HEADS if (found := matrix(f"{module}.weight")) is not None]
    tables = [found for module in EMBEDDINGS if (found := matrix(f"{module}.weight")) is not None]
    if not heads or not tables or heads[0].shape != tables[0].shape:
        return False
    return not _equal(heads[0], tables[0])


def _equal(first: NDArray, second: NDArray) -> bool:
    """Compares two matrices up to the first difference, which most pairs have at once."""
    rows = max(CHUNK_BYTES // max(first[:1].nbytes, 1), 1)
    return all(
        np.array_equal(
            first[start : start + rows].astype(np.float32),
            second[start : start + rows].astype(np.float32),
        )
        for start in range(0, len(first), rows)
    )
