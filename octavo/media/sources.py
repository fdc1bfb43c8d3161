"""Loads the bytes of media from a data URL, a file in the allowed folder, or an http(s) URL."""

from __future__ import annotations

import base64
import binascii
import functools
import re
import urllib.parse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.media.limits import ImageLimits, check_bytes
from octavo.text.ports import MEDIA_TYPES

if TYPE_CHECKING:
    import httpx2

FETCH_TIMEOUT_S = 10.0
"""Timeout of a fetch, in seconds."""

DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(;[\w.+-]+=[^;,]*)*(?P<base64>;base64)?,")


def read_source(source: str, limits: ImageLimits) -> bytes:
    scheme = source[:8].partition(":")[0].lower()
    if scheme == "data":
        return _from_data_url(source, limits)
    if scheme in ("http", "https"):
        return _fetch(source, limits)
    return read_file(source, limits)


def read_base64(text: str, limits: ImageLimits) -> bytes:
    """Decodes base64 within the size limit."""
    check_bytes(max(len(text) * 3 // 4 - 2, bool(text)), limits)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise limits.error(
            f"its base64 cannot be read: {error}",
            "encode the whole file as standard base64, without line breaks",
        ) from None
    check_bytes(len(data), limits)
    return data


def read_file(name: str, limits: ImageLimits) -> bytes:
    """Reads a file of the allowed folder, given by relative path or `file:` URL."""
    if limits.folder is None:
        kind = MEDIA_TYPES[limits.noun]
        raise limits.error(
            f"got {name[:80]!r}, expected data URLs such as data:{kind};base64,...",
            "start the engine with --media-dir to allow files of a directory",
        )
    folder = limits.folder.resolve()
    path = urllib.parse.unquote(name[5:]) if name.startswith("file:") else name
    path_inside = _inside(folder, Path(path)) or _inside(folder, folder / path.lstrip("/"))
    if path_inside is None:
        raise limits.error(
            f"there is no file {name[:80]!r} in the media directory",
            "use a file in --media-dir",
        )
    check_bytes(path_inside.stat().st_size, limits)
    return _bounded(path_inside, limits)


def read_own_file(path: Path, limits: ImageLimits) -> bytes:
    """Reads a file whose path comes from the program that embeds the engine."""
    own = replace(limits, folder=path.parent)
    return read_file(path.name, own)


def _inside(folder: Path, path: Path) -> Path | None:
    """Resolves a path; returns None if it is not a file inside the folder."""
    try:
        resolved = path.resolve(strict=True)
        return resolved if resolved.is_relative_to(folder) and resolved.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _bounded(path: Path, limits: ImageLimits) -> bytes:
    with path.open("rb") as file:
        data = file.read(limits.max_bytes + 1)
    check_bytes(len(data), limits)
    return data


def _from_data_url(url: str, limits: ImageLimits) -> bytes:
    head = DATA_URL.match(url[:256])
    if head is None or not head["base64"]:
        raise limits.error(
            f"got the data URL {url[:40]!r}, which is not a valid data URL",
            f"write it as data:{MEDIA_TYPES[limits.noun]};base64,...",
        )
    return read_base64(url[head.end() :], limits)


def _fetch(url: str, limits: ImageLimits) -> bytes:
    if not limits.fetches_urls:
        raise limits.error(
            f"got the address {url[:80]!r}, but fetching URLs is disabled",
            f"send the {limits.noun} as a data URL, or start the engine with --allow-media-urls",
        )
    import httpx2

    data = bytearray()
    try:
        with _get_client().stream("GET", url) as response:
            for part in response.raise_for_status().iter_raw():
                data += part
                if len(data) > limits.max_bytes:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise limits.error(
            f"the address {url[:80]!r} cannot be fetched: {error}",
            "check that the engine's machine can reach this address",
        ) from None
    check_bytes(len(data), limits)
    return bytes(data)


@functools.cache
def _get_client() -> httpx2.Client:
    """Returns the shared HTTP client; creating it loads certificates (0.1 s)."""
    import httpx2

    headers = {"User-Agent": "octavo", "Accept-Encoding": "identity"}
    return httpx2.Client(headers=headers, timeout=FETCH_TIMEOUT_S, follow_redirects=True)
