"""Detects files that were not downloaded: Git LFS pointers and web pages."""

from __future__ import annotations

from pathlib import Path

from octavo.api.errors import WeightMismatch

LFS_POINTER = b"version https://git-lfs"
PAGES = (b"<!doctype html", b"<html")
LENGTH = 64
"""Bytes to inspect at the start of a file."""


def refuse_placeholder(path: Path) -> None:
    """Raises WeightMismatch if a file is a Git LFS pointer or a web page."""
    with path.open("rb") as file:
        start = file.read(LENGTH).lstrip().lower()
    if start.startswith(LFS_POINTER):
        raise WeightMismatch(
            f"{path}: a Git LFS pointer, not the file itself",
            hint=f"run `git lfs pull` in {path.parent}",
        )
    if start.startswith(PAGES):
        raise WeightMismatch(
            f"{path}: an HTML page, not a model file",
            hint="download the file from its direct link; the site may require a login",
        )
