"""A Git LFS pointer, or a web page, in place of a model's file is named as what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint
from tests.support.tiny_tokenizer import tiny_model_with_text

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Log in</title></head></html>"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "m.gguf"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POINTER, "a Git LFS pointer, .*\nhint: run `git lfs pull`"),
        (PAGE, "an HTML page, not a model"),
    ],
    ids=["pointer", "page"],
)
def test_weights(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightMismatch, match=message) as caught:
        open_checkpoint(tmp_path / name if name == "m.gguf" else tmp_path)
    assert name in str(caught.value)


def test_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model_with_text(), path)
    (path / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(WeightMismatch, match=r"tokenizer\.json: a Git LFS pointer"):
        tokenizer_source(path, {}, {})
