"""Output layers beside embeddings that the config ties are read as transformers 5 reads them: with
numbers of their own where the file has others, and by whichever name a tied matrix has.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.api.errors import SetupError
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import build_programs
from tests.support.tiny_models import tiny_model

HEADS = {
    "gpt2": "lm_head",
    "qwen2": "lm_head",
    "gemma3_text": "lm_head",
    "t5": "lm_head",
    "mt5": "lm_head",
    "bart": "lm_head",
    "marian": "lm_head",
    "whisper": "proj_out",
}
"""Families whose tiny models have tied embeddings, and the modules of their output layers."""


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns the weights of a decoder, whose checkpoint is checked first."""
    checkpoint = open_checkpoint(path)
    programs = build_programs(checkpoint.config, every_key=True)
    check_tensors(checkpoint, programs.values())
    reader = WeightReader(checkpoint)
    return {weight.name: reader.load(weight).dequantize() for weight in programs["decoder"].weights}


def with_own_head(family: str, path: Path) -> Any:
    """Saves a model whose output layer has other numbers than its embeddings, and reads it again
    with transformers.
    """
    model = copy.deepcopy(tiny_model(family).model)
    head = getattr(model, HEADS[family])
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape))
    model.save_pretrained(path)
    again = type(model).from_pretrained(path)
    assert torch.equal(getattr(again, HEADS[family]).weight, head.weight)
    return again


@pytest.mark.parametrize("family", HEADS)
def test_a_head_with_its_own_numbers_is_read(family: str, tmp_path: Path) -> None:
    model = with_own_head(family, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    found = read(tmp_path)[f"{HEADS[family]}.weight"]
    np.testing.assert_array_equal(found, getattr(model, HEADS[family]).weight.detach().numpy())


@pytest.mark.parametrize("family", HEADS)
def test_a_head_that_repeats_the_embeddings_is_not_read(family: str, tmp_path: Path) -> None:
    tiny = tiny_model(family)
    tensors = load_file(tiny.path / "model.safetensors")
    head = getattr(tiny.model, HEADS[family]).weight.detach().clone()
    save_file(tensors | {f"{HEADS[family]}.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    assert read(tmp_path).keys() == read(tiny.path).keys()


@pytest.mark.parametrize("family", HEADS)
def test_embeddings_that_are_stored_as_the_head_are_found(family: str, tmp_path: Path) -> None:
    tiny = tiny_model(family)
    head = f"{HEADS[family]}.weight"
    table = getattr(tiny.model, HEADS[family]).weight.detach()
    tensors = {
        name: tensor
        for name, tensor in load_file(tiny.path / "model.safetensors").items()
        if tensor.shape != table.shape or not torch.equal(tensor, table)
    }
    save_file(tensors | {head: table.clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    wanted = read(tiny.path)
    for name, values in read(tmp_path).items():
        np.testing.assert_array_equal(values, wanted[name], name)
    config = tiny.config | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="is missing"):
        read(tmp_path)


def test_t5_of_transformers_5_ties_its_unscaled_head() -> None:
    """Its config says in a key of its own that rows are not scaled, and ties all the same."""
    tiny = tiny_model("t5", tie_word_embeddings=False)
    assert tiny.config["tie_word_embeddings"] is True
    assert tiny.config["scale_decoder_outputs"] is False
    assert "lm_head.weight" not in read(tiny.path)
