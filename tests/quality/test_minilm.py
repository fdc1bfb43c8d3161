"""minilm's embeddings are those of its transformers model, pooled as its modules say.

The oracle is transformers' BERT in float32 with sentence-transformers' formulas written out: the
mean of the last layer's rows, of length 1.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from octavo import LLM
from octavo.checkpoint.catalogue import resolve
from octavo.utils.progress import quiet
from tests.support.tiers import tier

pytestmark = pytest.mark.model

WORDS = (
    *("the", "boxes", "were", "shipped", "on", "Monday", "and", "why", "river", "light", "crossed"),
    *("Zürich", "in", "1998", "engineers", "measured", "42", "kilobytes", "of", "noise;", "then,"),
    *("photosynthesis", "beneath", "an", "old", "café's", "awning", "musicians", "played", "until"),
)
NUM_SENTENCES = 200
MAX_TOKENS = 256
BATCH = 8


def sentences(num: int) -> list[str]:
    """Returns seeded texts whose lengths are spread from one word to far too long."""
    generator = random.Random(7)
    lengths = [1 + index * 230 // num for index in range(num)]
    generator.shuffle(lengths)
    return [" ".join(generator.choices(WORDS, k=length)) for length in lengths]


def oracle(path: Path, texts: list[str]) -> NDArray[np.float32]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    rows = []
    for start in range(0, len(texts), BATCH):
        some = tokenizer(
            texts[start : start + BATCH],
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        with torch.no_grad():
            last = model(**some).last_hidden_state
        mask = some["attention_mask"][..., None]
        rows.append((last * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows)).numpy()


def cosines(texts: list[str], quantization: str | None) -> NDArray[np.float32]:
    """Returns the cosine of each text's embedding and the oracle's."""
    with LLM("minilm", report=quiet, quantization=quantization) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    found = np.array([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    return (found * oracle(resolve("minilm"), texts)).sum(axis=1)


@pytest.mark.parametrize(("quantization", "least"), [(None, 0.99999), ("int8", 0.9995)])
def test_embeddings_point_where_the_oracles_do(quantization: str | None, least: float) -> None:
    """The worst of all 200 texts has a cosine of 0.9997 in int8; `make test` takes 16 of them."""
    num = 16 if tier() == "sample" else NUM_SENTENCES
    assert cosines(sentences(num), quantization).min() >= least
