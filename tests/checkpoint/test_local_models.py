"""Models of both caches are listed with name, size and time, found by name, and removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from octavo.checkpoint.catalogue import CATALOGUE, CatalogueModel, ModelFile
from octavo.checkpoint.local_models import (
    find_local_model,
    get_quantization,
    list_local_models,
    remove_local_model,
)
from octavo.wiring.model_outline import read_outline
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf

REVISIONS = ("1" * 40, "2" * 40)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    tiny = CatalogueModel("tiny", "CC0", (ModelFile("tiny.gguf", 5, "", ()),))
    monkeypatch.setitem(CATALOGUE, "tiny", tiny)
    return tmp_path


def write(path: Path, content: bytes, age_s: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def write_repository(hub: Path, name: str, files: dict[str, bytes]) -> Path:
    """Writes a repository as huggingface-hub caches it, each file in two revisions."""
    repo = hub / f"models--{name.replace('/', '--')}"
    write(repo / "refs" / "main", REVISIONS[-1].encode())
    for file, content in files.items():
        blob = write(repo / "blobs" / file.replace("/", "-"), content, age_s=60)
        for revision in REVISIONS:
            link = repo / "snapshots" / revision / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return repo


def rows() -> dict[str, int]:
    return {model.name: model.num_bytes for model in list_local_models()}


def test_no_cache_holds_no_model() -> None:
    assert list_local_models() == []
    assert find_local_model("tiny") is None and find_local_model("maker/none") is None


def test_the_newest_model_comes_first(cache: Path) -> None:
    write(cache / "models" / "tiny" / "tiny.gguf", b"12345", age_s=120)
    write_repository(cache / "hub", "maker/dense", {"model.safetensors": b"1234"})
    models = list_local_models()
    assert [(m.name, m.num_bytes, m.modified_s) for m in models] == [
        ("maker/dense", 4, 1e9 - 60),
        ("tiny", 5, 1e9 - 120),
    ]
    assert models[1].path == cache / "models" / "tiny" / "tiny.gguf"
    assert (models[0].path / "model.safetensors").read_bytes() == b"1234"


def test_an_incomplete_download_is_not_listed_and_can_be_removed(cache: Path) -> None:
    write(cache / "models" / "tiny" / "tiny.gguf", b"123")
    part = write(cache / "hub" / "models--maker--half" / "blobs" / "ab.octavo-part", b"12")
    assert list_local_models() == []
    for name, num_bytes in (("tiny", 3), ("maker/half", 2)):
        found = find_local_model(name)
        assert found is not None and found.num_bytes == num_bytes
        remove_local_model(found)
        assert find_local_model(name) is None
    assert not part.exists() and not (cache / "models" / "tiny").exists()


def test_each_gguf_file_of_a_repository_is_a_model(cache: Path) -> None:
    repo = write_repository(
        cache / "hub",
        "maker/files",
        {
            "config.json": b"{}",
            "x-Q4_K_M.gguf": b"1234",
            "big/x-Q8_0-00001-of-00002.gguf": b"12345",
            "big/x-Q8_0-00002-of-00002.gguf": b"123",
            "half-Q2_K-00001-of-00002.gguf": b"12",
            "mmproj-F16.gguf": b"1",
        },
    )
    split = "maker/files/big/x-Q8_0-00001-of-00002.gguf"
    assert rows() == {split: 8, "maker/files/x-Q4_K_M.gguf": 4}
    for name in ("maker/files:q8_0", "hf.co/maker/files:Q8_0", split.replace("-00001-", "-00002-")):
        assert find_local_model(name) == find_local_model(split)
    assert find_local_model("maker/files:Q2_K") is None
    found = find_local_model(split)
    assert found is not None and found.path.name == "x-Q8_0-00001-of-00002.gguf"
    remove_local_model(found)
    assert rows() == {"maker/files/x-Q4_K_M.gguf": 4}
    assert sorted(p.name for p in (repo / "blobs").iterdir()) == [
        *("config.json", "half-Q2_K-00001-of-00002.gguf", "mmproj-F16.gguf", "x-Q4_K_M.gguf")
    ]
    last = find_local_model("maker/files/x-Q4_K_M.gguf")
    assert last is not None
    remove_local_model(last)
    assert rows() == {} and not repo.exists()


@pytest.mark.parametrize("name", ["a-Q4_K_M.gguf", "a.gguf"])
def test_a_quantization_is_named_alike_by_list_and_server(tmp_path: Path, name: str) -> None:
    """If the file's name has none, the server tells the format of most weights."""
    path = tmp_path / name
    write_tiny_gguf(path, "llama", tiny_model("llama"))
    named = get_quantization(path)
    assert named == ("Q4_K_M" if "Q4" in name else "")
    assert read_outline(path, {"skip_tokenizer_init": True}).facts.weight_format == (named or "F32")


def test_a_repository_without_weights_is_no_model(cache: Path) -> None:
    write_repository(cache / "hub", "maker/config", {"config.json": b"{}"})
    assert rows() == {}
    assert find_local_model("maker/config") is not None, "rm may still remove it"


@pytest.mark.parametrize("name", ["", ".", "..", "../..", "a/b/c/d", "/etc", "x\0y", "n" * 5000])
def test_a_name_that_is_no_model_finds_nothing(cache: Path, name: str) -> None:
    write(cache / "models" / "tiny" / "tiny.gguf", b"12345")
    write_repository(cache / "hub", "maker/dense", {"model.safetensors": b"1234"})
    assert find_local_model(name) is None
