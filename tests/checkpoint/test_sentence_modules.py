"""The pooling of a checkpoint in the layout of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.open import open_checkpoint, open_header

PACKAGE = "sentence_transformers.models"

MINILM = {
    "word_embedding_dimension": 384,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}


def save(folder: Path, pooling: Any, *others: str, limits: Any = None) -> Path:
    kinds = ["Transformer", "Pooling", *others]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{PACKAGE}.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if limits is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    return folder


def test_the_pooling_is_what_the_files_say(tmp_path: Path) -> None:
    """Weights or none, the config holds mode, normalising and limits, beside what it had."""
    limits = {"max_seq_length": 256, "do_lower_case": True}
    folder = save(tmp_path, MINILM, "Normalize", limits=limits)
    expected = {"mode": "mean", "normalize": True, "do_lower_case": True, "max_seq_length": 256}
    assert open_header(folder).config == {"model_type": "bert", "pooling": expected}
    save_file({"x": torch.ones(3)}, folder / "model.safetensors")
    assert open_checkpoint(folder).config == {"model_type": "bert", "pooling": expected}


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        (MINILM | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        (MINILM | {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        (MINILM | {"pooling_mode_cls_token": True}, "cls + mean"),
        ({"word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_modes(tmp_path: Path, pooling: dict[str, Any], mode: str) -> None:
    """Each mode is told from flags or its name; several are spelled out; nothing is normalised."""
    found = open_header(save(tmp_path, pooling)).config["pooling"]
    assert found == {"mode": mode, "normalize": False, "do_lower_case": False}


def test_modules_behind_the_pooling_are_spelled_out(tmp_path: Path) -> None:
    """An unknown module changes the mode's name, so no family takes it for plain pooling."""
    found = open_header(save(tmp_path, MINILM, "LSTM", "Normalize")).config["pooling"]
    assert found["mode"] == "mean, then LSTM" and found["normalize"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"out_features": 0}, "got out_features 0 and bias True, expected an integer of at least"),
        ({"out_features": 8, "use_residual": True}, "use_residual is true, which is not supported"),
    ],
)
def test_bad_dense_modules_are_rejected(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = save(tmp_path, MINILM, "Dense", "Normalize")
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMismatch, match=message):
        open_header(folder)


def test_without_modules_nothing_is_guessed(tmp_path: Path) -> None:
    """A folder without modules.json, or one without a pooling, has no pooling."""
    (tmp_path / "config.json").write_text("{}")
    assert open_header(tmp_path).config == {}
    (tmp_path / "modules.json").write_text(json.dumps([{"type": f"{PACKAGE}.Transformer"}]))
    assert open_header(tmp_path).config == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {}, "expected a list of JSON objects"),
        ("modules.json", [1], "expected a list of JSON objects"),
        ("modules.json", [{"type": 3}], "a module requires a type and a path"),
        ("modules.json", [{"type": "Pooling", "path": "../x"}], "is outside the folder"),
        ("modules.json", [{"type": "Pooling", "path": "/x"}], "is outside the folder"),
        ("modules.json", [{"type": "Pooling", "path": "2_Pooling"}], "the file is missing"),
        ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling_mode: got 3, expected a string"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "no pooling mode is set"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": 1}, "got 1, expected true or false"),
        (
            "sentence_bert_config.json",
            {"max_seq_length": 0},
            "got 0, expected an integer of at least 1",
        ),
        (
            "sentence_bert_config.json",
            {"max_seq_length": True},
            "got True, expected an integer of at least 1",
        ),
        ("sentence_bert_config.json", {"do_lower_case": "no"}, "got 'no', expected true or false"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    """A wrong value is refused with the file that holds it and what was found."""
    save(tmp_path, MINILM)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(WeightMismatch, match=message):
        open_header(tmp_path)


def save_prompts(folder: Path, name: Any) -> None:
    settings = {"prompts": {"query": "query: ", "passage": ""}, "default_prompt_name": name}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(("name", "prompt"), [(None, ""), ("query", "query: "), ("passage", "")])
def test_the_default_prompt_is_part_of_the_pooling(
    tmp_path: Path, name: str | None, prompt: str
) -> None:
    save_prompts(save(tmp_path, MINILM), name)
    assert open_header(tmp_path).config["pooling"].get("prompt", "") == prompt


def test_a_pooling_that_leaves_the_prompt_out_is_another_mode(tmp_path: Path) -> None:
    """It counts where there is a prompt only."""
    folder = save(tmp_path, MINILM | {"include_prompt": False})
    assert open_header(folder).config["pooling"]["mode"] == "mean"
    save_prompts(folder, "query")
    assert open_header(folder).config["pooling"]["mode"] == "mean without the prompt"


def test_a_default_prompt_that_is_not_there(tmp_path: Path) -> None:
    save_prompts(save(tmp_path, MINILM), "document")
    with pytest.raises(WeightMismatch, match="default_prompt_name is 'document'"):
        open_header(tmp_path)
