"""References to models of the Hugging Face hub, as users write them.

    OWNER/REPO                     a repository
    OWNER/REPO:Q4_K_M              a quantization among its GGUF files
    OWNER/REPO/FOLDER/FILE.gguf    one of its files
    hf.co/..., huggingface.co/...  the same, with the hub's name in front
    https://huggingface.co/OWNER/REPO/blob/main/FILE.gguf

Parses text only. Which files a reference means is decided by `checkpoint/hub_files.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
MAIN = "main"
LATEST = "latest"
"""Tag that Ollama's clients append to a name without one; it selects nothing."""

REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A repository's name; a few old ones have no owner."""
QUANT = re.compile(r"\w[\w.-]*")
INSIDE = re.compile(
    r"(?P<repository>[^/]+/[^/]+)/(?P<view>blob|resolve|raw|tree)/(?P<revision>[^/]+)"
    r"(/(?P<inside>.+))?"
)
"""Path of an address below a repository's name."""
FILE = re.compile(r"[^\\\0]+\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository of the hub, and what is meant of it."""

    repository: str
    file: str = ""
    """Path of a GGUF file in the repository; "" if none is named."""
    quant: str = ""
    """Name of a quantization, as it was written; "" if none is named."""
    revision: str = MAIN

    def __str__(self) -> str:
        if self.file:
            return f"{self.repository}/{self.file}"
        return f"{self.repository}:{self.quant}" if self.quant else self.repository

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What is equal for two spellings of one reference."""
        return (self.repository.lower(), self.file, self.quant.lower(), self.revision)


def parse_hub_reference(text: str) -> HubReference | None:
    """Returns what a text means on the hub; None if it is not the name of anything there."""
    if "://" in text:
        return _parse_url(text)
    host, _, path = text.partition("/")
    return _parse_path(path if host.lower() in HOSTS else text)


def same_model(name: str, other: str) -> bool:
    """Tells whether two names mean the same model: equal texts, or spellings of one reference."""
    if name == other:
        return True
    first, second = parse_hub_reference(name), parse_hub_reference(other)
    return first is not None and second is not None and first.key == second.key


def _parse_url(text: str) -> HubReference | None:
    """Parses the address of a repository or of a file, as a browser shows or copies it."""
    try:
        url, endpoint = urlsplit(text), urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError:
        return None
    is_hub = url.netloc.lower() in (*HOSTS, endpoint.netloc.lower())
    if url.scheme not in ("http", "https") or not is_hub:
        return None
    path = unquote(url.path).strip("/")
    found = INSIDE.fullmatch(path)
    if found is None:
        return _parse_path(path)
    reference = _parse_path(found["repository"])
    inside = found["inside"] or ""
    below = [found["revision"], *(inside.split("/") if inside else ())]
    if reference is None or not _is_inside(below):
        return None
    if FILE.fullmatch(inside):
        return replace(reference, file=inside, revision=found["revision"])
    folder = inside.rpartition("/")[2] if found["view"] == "tree" else ""
    return replace(reference, quant=folder, revision=found["revision"])


def _parse_path(path: str) -> HubReference | None:
    """Parses OWNER/REPO with what may follow it."""
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
    """Tells whether a path stays below its folder."""
    return all(part not in ("", ".", "..") for part in parts)
