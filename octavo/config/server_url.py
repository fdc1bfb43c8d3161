"""Parses a server's address as users write it: http://HOST:PORT, HOST:PORT, HOST or :PORT.

A trailing slash and the API's /v1 are removed, so that a base URL of OpenAI's clients works too.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from octavo.api.errors import ConfigError

DEFAULT_PORT = 8000
"""Port of an address without a scheme and a port, which is the default of `octavo serve`."""
PORTS = {"http": 80, "https": 443}
"""Port of a URL without one, by scheme."""


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A checked address; `str` gives its canonical URL."""

    scheme: str
    host: str
    port: int
    authority: str
    """Host and port as they stand in the URL and in the Host header."""
    path: str
    """What stands before each route; empty or /PREFIX."""

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_server_url(text: str, *, hint: str | None = None) -> ServerUrl:
    """Returns the address of a server; raises ConfigError for other schemes, user names, queries
    and characters that no URL has.
    """
    parts, port = _split(text)
    has_more = parts.query or parts.fragment or parts.username is not None
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in PORTS or not parts.hostname or port is None or has_more or not is_plain:
        raise ConfigError(
            f"url: got {text!r}, allowed is HOST:PORT, http://HOST:PORT or https://HOST", hint=hint
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return ServerUrl(parts.scheme, parts.hostname, port, parts.netloc, path)


def _split(text: str) -> tuple[SplitResult, int | None]:
    """Returns the parts of an address and its port, which is None if the address has none that is
    a number.
    """
    has_scheme = "://" in text
    try:
        parts = urlsplit(text if has_scheme else f"http://{text}")
        if not has_scheme and parts.netloc.startswith(":"):
            parts = parts._replace(netloc=f"127.0.0.1{parts.netloc}")
        if not has_scheme and parts.port is None:
            parts = parts._replace(netloc=f"{parts.netloc.rstrip(':')}:{DEFAULT_PORT}")
        return parts, parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return urlsplit(""), None
