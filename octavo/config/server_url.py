"""Parses a server's address: http://HOST:PORT, HOST:PORT, HOST or :PORT.

A trailing slash and /v1 are removed, so that the base URL of an OpenAI client works.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from octavo.api.errors import ConfigError

DEFAULT_PORT = 8000
"""Port of an address without scheme and port; the default of `octavo serve`."""
PORTS = {"http": 80, "https": 443}
"""Default ports of URLs, by scheme."""


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A parsed address; `str` returns its canonical URL."""

    scheme: str
    host: str
    port: int
    authority: str
    """Host and port as in the URL and the Host header."""
    path: str
    """Path before each route: "" or /PREFIX."""

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_server_url(text: str, *, hint: str | None = None) -> ServerUrl:
    """Parses a server's address; raises ConfigError for other schemes, user names, queries and
    invalid characters.
    """
    parts, port = _split(text)
    has_more = parts.query or parts.fragment or parts.username is not None
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme not in PORTS or not parts.hostname or port is None or has_more or not is_plain:
        raise ConfigError(
            f"url: got {text!r}, expected HOST:PORT, http://HOST:PORT or https://HOST", hint=hint
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return ServerUrl(parts.scheme, parts.hostname, port, parts.netloc, path)


def _split(text: str) -> tuple[SplitResult, int | None]:
    """Splits an address; the port is None if it is missing or not a number."""
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
