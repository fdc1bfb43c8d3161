"""Families with random options give transformers' logits: odd heads and vocabularies, one kv head,
tied and own output layers, biases, windows, activations, factors, ropes.

The oracle computes in float64. Tolerance 1e-9 of the largest logit on the reference; natively 3e-5,
or four times the error that PyTorch itself has in float32 where a model is badly conditioned.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.random_configs import random_options
from tests.support.tiers import examples
from tests.support.tiny_models import FAMILIES, double_precision, in_float64, tiny_model

torch.set_num_threads(1)

SDPA = ("falcon",)
"""Families whose eager attention adds ALiBi twice in transformers 5.23."""
REFUSED = (StrictDataclassError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
"""Errors with which transformers refuses options that do not go together, or fails on them."""


def accepted(family: str) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Yields models that transformers runs, with token ids and their logits."""
    for seed in count():
        assert seed < 1000, "transformers refuses what is drawn"
        try:
            tiny = tiny_model(family, **random_options(family, seed))
            ids = np.random.default_rng(seed).integers(0, tiny.config["vocab_size"], 70)
            with double_precision():
                model = in_float64(tiny.model, attention="sdpa" if family in SDPA else "eager")
                wanted = model(torch.tensor(ids)[None]).logits[0].numpy()
        except REFUSED:
            continue
        yield tiny, ids, wanted


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(abs(found - wanted).max() / abs(wanted).max())


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    for tiny, ids, wanted in islice(accepted(family), examples(1)):
        build_programs(tiny.config, every_key=True)
        reference = PagedRunner(tiny.path, backend_named("reference")).logits(ids, 29)
        assert error(reference, wanted) < 1e-9, tiny.config
        with torch.no_grad():
            theirs = tiny.model(torch.tensor(ids)[None]).logits[0].numpy()
        native = PagedRunner(tiny.path, backend_named("native"))
        found = native.logits(ids, 29)
        assert error(found, wanted) < max(3e-5, 4 * error(theirs, wanted)), tiny.config
        np.testing.assert_array_equal(native.logits(ids), found)
