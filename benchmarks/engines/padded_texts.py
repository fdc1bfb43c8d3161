"""Texts as engines of fixed batches take them: sorted by length, padded to the longest of a batch,
as sentence-transformers does it. Needs NumPy and transformers' tokenizer.
"""

from collections.abc import Callable

import numpy as np
from transformers import AutoTokenizer

BATCH = 32
MOST_TOKENS = 256
INPUTS = ("input_ids", "attention_mask", "token_type_ids")

Forward = Callable[[dict[str, np.ndarray]], np.ndarray]
"""Computes the last layer's rows `[texts, tokens, width]` of a batch's inputs."""


class PaddedTexts:
    """Batches of texts, and the mean of their rows."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def inputs(self, texts: list[str]) -> dict[str, np.ndarray]:
        """Returns a batch's inputs, each `[texts, tokens]`."""
        made = self._tokenizer(
            texts, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="np"
        )
        return {name: np.asarray(made[name], np.int64) for name in INPUTS}

    def embed(self, texts: list[str], forward: Forward) -> np.ndarray:
        """Returns the normalised mean of each text's rows, `[texts, width]`."""
        order = np.argsort([-len(text) for text in texts], kind="stable")
        rows = []
        for start in range(0, len(texts), BATCH):
            inputs = self.inputs([texts[i] for i in order[start : start + BATCH]])
            mask = inputs["attention_mask"][..., None].astype(np.float32)
            sums = (forward(inputs) * mask).sum(axis=1)
            rows.append(sums / np.linalg.norm(sums, axis=1, keepdims=True))
        return np.concatenate(rows)[np.argsort(order)]
