"""The address and secret for ranks on other machines."""

from __future__ import annotations

from octavo.api.errors import ConfigError
from octavo.config.hosts import is_local


def parse_rank_address(text: str) -> tuple[str, int]:
    """Parses "HOST:PORT"; raises ConfigError if it is invalid."""
    host, _, port = text.rpartition(":")
    if not host or host == "0.0.0.0" or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"rank_address: got {text!r}, expected HOST:PORT, such as 10.0.0.1:8990",
            hint="the host is an address of the first rank's machine that other machines can reach",
        )
    return host, int(port)


def check_rank_secret(host: str, secret: str | None) -> None:
    """Raises ConfigError if the address is reachable from other machines and no secret is set."""
    if not is_local(host) and not secret:
        raise ConfigError(
            f"rank_address: got the host {host!r}, which other machines can reach, without"
            f" rank_secret",
            hint="set the same rank_secret on the engine and its ranks, or use 127.0.0.1",
        )
