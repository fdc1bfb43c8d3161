"""The digest of a model's content, which lets clients distinguish its versions.

huggingface-hub's cache names files by their hashes, and the catalogue lists the hashes of its
files. For other files, only the size and the first and last MiB are hashed, because reading a large
model would take minutes.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from octavo.checkpoint.catalogue import CATALOGUE, find_name

SHA256 = re.compile(r"[0-9a-f]{64}")
BLOB = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
"""File names in huggingface-hub's cache: SHA-256 for large files, git's SHA-1 for small ones."""
SAMPLED_BYTES = 1 << 20


def get_model_digest(path: Path) -> str:
    """Returns a SHA-256 in hexadecimal: of the file itself for a single file with a known hash,
    else of all file names and hashes. Raises OSError.
    """
    name = find_name(path)
    if name is not None:
        hashes = {file.name: file.sha256 for file in CATALOGUE[name].files}
    elif path.is_file():
        hashes = {path.name: _get_hash(path)}
    else:
        files = (file for file in path.rglob("*") if file.is_file())
        hashes = {file.relative_to(path).as_posix(): _get_hash(file) for file in files}
    only = next(iter(hashes.values()), "")
    if len(hashes) == 1 and SHA256.fullmatch(only):
        return only
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _get_hash(file: Path) -> str:
    blob = file.resolve()
    if blob.parent.name == "blobs" and BLOB.fullmatch(blob.name):
        return blob.name
    size = blob.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with blob.open("rb") as content:
        digest.update(content.read(SAMPLED_BYTES))
        content.seek(max(SAMPLED_BYTES, size - SAMPLED_BYTES))
        digest.update(content.read())
    return digest.hexdigest()
