"""Digests of models: of the content, not of names and places."""

from __future__ import annotations

import hashlib
import shutil

import pytest

from octavo.checkpoint.catalogue import CATALOGUE, resolve
from octavo.checkpoint.digest import get_model_digest


@pytest.mark.model
def test_a_catalogue_model_has_the_digest_of_its_file():
    path = resolve("smollm2")
    assert get_model_digest(path) == CATALOGUE["smollm2"].files[0].sha256


def test_a_file_of_the_hubs_cache_has_the_name_of_its_blob(tmp_path):
    content = b"weights"
    name = hashlib.sha256(content).hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(content)
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    link = tmp_path / "snapshots" / "1" / "m.gguf"
    link.symlink_to(tmp_path / "blobs" / name)
    assert get_model_digest(link) == name


def test_other_files_differ_by_content_and_not_by_place(tmp_path):
    file = tmp_path / "a.gguf"
    content = bytes(3 << 20)
    file.write_bytes(content)
    first = get_model_digest(file)
    assert len(first) == 64
    copy = shutil.copy(file, tmp_path / "b.gguf")
    assert get_model_digest(tmp_path / "b.gguf") == first and copy
    for changed in (b"x" + content[1:], content[:-1] + b"x", content + b"x"):
        file.write_bytes(changed)
        assert get_model_digest(file) != first


def test_a_directory_has_one_digest_over_its_files(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder / "1_Pooling").mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "1_Pooling" / "config.json").write_text("{}")
    first = get_model_digest(tmp_path / "one")
    assert get_model_digest(tmp_path / "two") == first and len(first) == 64
    (tmp_path / "two" / "1_Pooling" / "config.json").write_text("[]")
    assert get_model_digest(tmp_path / "two") != first
