"""References to models on the Hugging Face hub, as users write them.

    OWNER/REPO                     a repository
    OWNER/REPO:Q4_K_M              a quantization among its GGUF files
    OWNER/REPO/FOLDER/FILE.gguf    one of its files
    hf.co/..., huggingface.co/...  the same with the hub's host name
    https://huggingface.co/OWNER/REPO/blob/main/FILE.gguf

`checkpoint/hub_files.py` chooses the files that a reference selects.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
MAIN = "main"
LATEST = "latest"
"""Tag that Ollama's clients append to names without one; ignored."""

REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A repository's name; some old ones have no owner."""
QUANT = re.compile(r"\w[\w.-]*")
INSIDE = re.compile(
    r"(?P<repository>[^/]+/[^/]+)/(?P<view>blob|resolve|raw|tree)/(?P<revision>[^/]+)"
    r"(/(?P<inside>.+))?"
)
"""Path of a URL within a repository."""
FILE = re.compile(r"[^\\\0]+\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository on the hub, and the selected file or quantization."""

    repository: str
    file: str = ""
    """Path of a GGUF file in the repository; "" if none is named."""
    quant: str = ""
    """Name of a quantization, as written; "" if none is named."""
    revision: str = MAIN

    def __str__(self) -> str:
        if self.file:
            return f"{self.repository}/{self.file}"
        return f"{self.repository}:{self.quant}" if self.quant else self.repository

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Key that is equal for different spellings of the same reference."""
        return (self.repository.lower(), self.file, self.quant.lower(), self.revision)


def parse_hub_reference(text: str) -> HubReference | None:
    """Parses a reference or a URL of the hub; returns None if the text is neither."""
    if "://" in text:
        return _parse_url(text)
    host, _, path = text.partition("/")
    return _parse_path(path if host.lower() in HOSTS else text)


def same_model(name: str, other: str) -> bool:
    """Returns whether two names are equal texts or references to the same model."""
    if name == other:
        return True
    first, second = parse_hub_reference(name), parse_hub_reference(other)
    return first is not None and second is not None and first.key == second.key


def _parse_url(text: str) -> HubReference | None:
    """Parses the URL of a repository or a file, as copied from a browser; returns None if it is not
    one.
    """
    try:
        url, endpoint = urlsplit(text), urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError:
        return None
    is_hub = url.netloc.lower() in (*HOSTS, endpoint.netloc.lower())
    if url.scheme not in ("http", "https") or not is_hub:
        return None
    path = unquote(url.path).strip("/")
    match = INSIDE.fullmatch(path)
    if match is None:
        return _parse_path(path)
    reference = _parse_path(match["repository"])
    inside = match["inside"] or ""
    below = [match["revision"], *(inside.split("/") if inside else ())]
    if reference is None or not _is_inside(below):
        return None
    if FILE.fullmatch(inside):
        return replace(reference, file=inside, revision=match["revision"])
    folder = inside.rpartition("/")[2] if match["view"] == "tree" else ""
    return replace(reference, quant=folder, revision=match["revision"])


def _parse_path(path: str) -> HubReference | None:
    """Parses OWNER/REPO with an optional quantization or file; returns None if the text is not of
    this form.
    """
    parts = path.split("/")
    if not _is_inside(parts):
        return None
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    repository, colon, quant = repository.partition(":")
    if not REPOSITORY.fullmatch(repository) or (colon and not QUANT.fullmatch(quant)):
        return None
    if file:
        is_file = FILE.fullmatch(file) and not colon
        return HubReference(repository, file=file) if is_file else None
    if FILE.fullmatch(repository):
        return None
    return HubReference(repository, quant="" if quant.lower() == LATEST else quant)


def _is_inside(parts: list[str]) -> bool:
    """Returns whether a path has no empty or relative parts."""
    return all(part not in ("", ".", "..") for part in parts)
