"""Checkpoints in bf16 and in shards, with a config of transformers 4 or of transformers 5, give the
numbers of the model that transformers makes of the same files, whatever the family.

The oracle reads the files by itself and computes in float64. Tolerance 1e-9 of the largest number
on the reference, 3e-5 natively in float32.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from tests.models.test_seq2seq import computed_table
from tests.models.test_t5 import logits as answers
from tests.support.every_family import EVERY_FAMILY, NESTED, OLDER, copy_modules, tiny_of
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import double_precision, in_float64
from tests.support.tiny_other_shapes import CONFIGS, ENCODERS
from tests.support.tiny_shapes import ENCODER_DECODERS

torch.set_num_threads(1)

TOLERANCE = {"reference": 1e-9, "native": 3e-5}
IDS = np.random.default_rng(4).integers(3, 130, 60)
SEEN_APART = (*CONFIGS, *NESTED, "whisper")
"""Families whose inputs are no token ids alone: test_images.py and test_whisper.py have them."""
CASES = [
    (family, version)
    for family in EVERY_FAMILY
    if family not in SEEN_APART
    for version in ((4, 5) if family in OLDER else (5,))
]


def save(family: str, folder: Path, *, older: bool) -> None:
    """Saves the family's model in bf16, in shards of 40 kB."""
    tiny = tiny_of(family)
    rounded = deepcopy(tiny.model).bfloat16()
    rounded.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    copy_modules(tiny.path, folder)
    if older:
        (folder / "config.json").write_text(json.dumps(OLDER[family]))


def wanted(family: str, folder: Path) -> NDArray[np.float64]:
    """Returns what transformers computes of the files."""
    read = type(tiny_of(family).model).from_pretrained(folder, dtype=torch.float32)
    read.config.dtype = torch.float64  # also of what the twin computes by itself
    twin = in_float64(read, attention="sdpa" if family == "falcon" else "eager")
    ids = torch.tensor(IDS)[None]
    with double_precision():
        if family in ENCODERS:
            found = twin(ids).last_hidden_state[0].mean(dim=0, keepdim=True)
        elif family in ENCODER_DECODERS:
            _with_table(family, twin)
            found = twin(ids, decoder_input_ids=ids[:, :40], use_cache=False).logits[0]
        else:
            found = twin(ids).logits[0]
    numbers: NDArray[np.float64] = found.numpy()
    assert numbers.dtype == np.float64
    return numbers


def _with_table(family: str, twin: Any) -> None:
    """Gives the model the table of positions of float32, where it computes one."""
    table = computed_table(tiny_of(family))
    for module in twin.modules():
        if table is not None and "SinusoidalPositionalEmbedding" in type(module).__name__:
            name = "weight" if hasattr(module, "weight") else "weights"
            values = torch.tensor(table).double()
            setattr(module, name, torch.nn.Parameter(values) if name == "weight" else values)


def found(family: str, folder: Path, backend: str) -> NDArray[Any]:
    load = WeightReader(open_checkpoint(folder), "float32").load
    runner = PagedRunner(folder, backend_named(backend), load=load)
    if family in ENCODERS:
        return runner.step([(runner.add(IDS), 0, len(IDS))], "encoder")["pooled"]
    if family in ENCODER_DECODERS:
        return answers(runner, 40, IDS, IDS[:40])
    return runner.logits(IDS)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("family", "version"), CASES)
def test_numbers_are_those_of_transformers(family: str, version: int, tmp_path: Path) -> None:
    save(family, tmp_path, older=version == 4)
    expected = wanted(family, tmp_path)
    for backend, share in TOLERANCE.items():
        np.testing.assert_allclose(
            found(family, tmp_path, backend),
            expected,
            rtol=0,
            atol=share * abs(expected).max(),
            err_msg=backend,
        )
