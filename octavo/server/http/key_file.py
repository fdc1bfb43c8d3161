"""API keys with names and limits, from a YAML, TOML or JSON file.

The file has a list `keys`; each entry has a `name`, a `key` or its `sha256` digest, and optionally
`operator` and limits. Only digests are kept in memory.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from octavo.api.errors import ConfigError
from octavo.config.data_file import read_data_file

MAX_FILE_BYTES = 4 << 20
Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class KeyLimits(msgspec.Struct, frozen=True):
    """Limits of one key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and generated tokens per minute."""
    max_running: int | None = None
    """Concurrent requests, including jobs."""


class ApiKey(msgspec.Struct, frozen=True):
    name: str
    """Name in requests, logs and metrics; "" for the only key of a flag."""
    digest: bytes
    """SHA-256 of the key."""
    is_operator: bool = False
    limits: KeyLimits = KeyLimits()


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of a key file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Fa-f]{64}$")] | None = None
    operator: bool = False
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_running: Limit | None = None

    def api_key(self, where: str) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            count = "neither" if self.key is None else "both"
            raise ConfigError(
                f"api_key_file: {where}: {self.name}: got {count}, expected exactly one of key and"
                f" sha256"
            )
        digest = bytes.fromhex(self.sha256) if self.sha256 else hash_key(self.key or "")
        limits = KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.max_running)
        return ApiKey(self.name, digest, self.operator, limits)


class KeyList(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyEntry]


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_key_file(path: str) -> list[ApiKey]:
    """Reads the keys of a file. Raises ConfigError if it is invalid, without showing a key."""
    file = read_data_file(path, name="api_key_file", max_bytes=MAX_FILE_BYTES, has_secrets=True)
    entries = file.convert(KeyList, hint="docs/guides/access.md shows a key file").keys
    keys = [entry.api_key(file.where("keys", index)) for index, entry in enumerate(entries)]
    for part in ("name", "digest"):
        values = [getattr(key, part) for key in keys]
        twice = next((index for index, value in enumerate(values) if value in values[:index]), None)
        if twice is not None:
            raise ConfigError(
                f"api_key_file: {file.where('keys', twice)}: another key has the same {part}"
            )
    if not keys:
        raise ConfigError(
            f"api_key_file: {path} contains no key", hint="docs/guides/access.md shows a key file"
        )
    return keys
