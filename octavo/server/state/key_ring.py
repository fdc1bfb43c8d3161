"""All API keys of a server, from flags and the key file, which can be reloaded.

Keys are compared in constant time.
"""

from __future__ import annotations

import hmac
import logging

from octavo.api.errors import ConfigError
from octavo.server.http.key_file import ApiKey, hash_key, read_key_file
from octavo.server.settings import ServerSettings
from octavo.server.state.account import Account

OPERATOR_NAME = "operator"

logger = logging.getLogger(__name__)


class KeyRing:
    """The accepted keys; if empty, requests need none."""

    def __init__(self, settings: ServerSettings) -> None:
        """Reads the key file, if any; raises ConfigError if it is invalid."""
        self._path = settings.api_key_file
        self._from_flags = _keys_of_flags(settings)
        self._accounts: dict[str, Account] = {}
        self._keys: list[ApiKey] = []
        self._load()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """Returns the matching key, or None. Compares with every key, so that the time reveals
        nothing.
        """
        digest = hash_key(secret)
        matching = [key for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return matching[0] if matching else None

    def may_operate(self, key: ApiKey) -> bool:
        """Returns whether a key is an operator's. A single key always is one."""
        return key.is_operator or len(self._keys) == 1

    def account(self, name: str) -> Account | None:
        """Returns the account of a key with limits; None for keys without limits."""
        return self._accounts.get(name)

    def reload(self) -> None:
        """Reloads the key file; if it is invalid, the keys are unchanged."""
        try:
            self._load()
        except ConfigError as error:
            logger.error("the API keys were not reloaded: %s", error.message)
        else:
            logger.warning("reloaded the key file: %d keys", len(self._keys))

    def _load(self) -> None:
        from_file = read_key_file(self._path) if self._path is not None else []
        keys = self._from_flags + from_file
        for part in ("name", "digest"):
            if len({getattr(key, part) for key in keys}) < len(keys):
                raise ConfigError(f"two API keys have the same {part}")
        for key in keys:
            if key.name in self._accounts:
                self._accounts[key.name].change(key.limits)
            elif any(value is not None for value in _values(key)):
                self._accounts[key.name] = Account(key.name, key.limits)
        self._keys = keys


def _keys_of_flags(settings: ServerSettings) -> list[ApiKey]:
    """Returns the keys of flags. A single one has no name."""
    secrets = list(dict.fromkeys(settings.api_key))
    is_only = len(secrets) == 1 and settings.api_key_file is None
    keys = [
        ApiKey("" if is_only else f"key-{number}", hash_key(secret))
        for number, secret in enumerate(secrets, 1)
    ]
    if settings.operator_key is not None:
        keys.append(ApiKey(OPERATOR_NAME, hash_key(settings.operator_key), is_operator=True))
    return keys


def _values(key: ApiKey) -> tuple[int | None, ...]:
    limits = key.limits
    return (limits.requests_per_minute, limits.tokens_per_minute, limits.max_running)
