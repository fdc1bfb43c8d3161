"""Parses the addresses of engines that exchange KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.api.errors import ConfigError
from octavo.config.hosts import is_local

MAX_PORT = 65535


def parse_address(text: str, *, name: str) -> tuple[str, int]:
    """Returns host and port of "HOST:PORT"; raises ConfigError naming the option if it is
    invalid.
    """
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    # The next port is used for blocks.
    if not host or not port.isdecimal() or not 0 < int(port) < MAX_PORT:
        raise ConfigError(
            f"{name}: got {text!r}, expected HOST:PORT with a port of 1 to 65534, such as"
            " 127.0.0.1:8998"
        )
    return host, int(port)


def endpoint(host: str, port: int) -> str:
    """Returns an address in ZeroMQ's format."""
    return f"tcp://{host}:{port}"


def join_endpoints(endpoints: Sequence[str]) -> str:
    """Joins the endpoints of an engine's ranks, in rank order, to one string."""
    return ",".join(endpoints)


def split_endpoints(text: str) -> list[str]:
    """Splits a string of `join_endpoints` into the endpoints of the ranks."""
    return text.split(",")


def check_ports(port: int, num_ranks: int, *, name: str) -> None:
    """Raises ConfigError if there are not enough port numbers above `port`: each rank needs one."""
    if port + num_ranks > MAX_PORT:
        raise ConfigError(
            f"{name}: got the port {port}, expected at most {MAX_PORT - num_ranks}: each of"
            f" {num_ranks} ranks uses a port above it"
        )


def check_address(host: str, secret: str | None, *, name: str) -> None:
    """Raises ConfigError if other machines can reach the address and no secret is set."""
    if not is_local(host) and not secret:
        raise ConfigError(
            f"{name}: got the host {host!r}, which other machines can reach, without"
            f" kv_transfer_secret",
            hint="set the same kv_transfer_secret on all engines, or listen on 127.0.0.1: a peer"
            " can read every KV block of this engine",
        )


@dataclass(frozen=True, slots=True)
class TransferAddresses:
    """Addresses at which a worker sends blocks, and how it fetches them."""

    fingerprint: bytes
    """Digest of everything that determines a block's bytes."""
    listen: str | None
    """Endpoint at which other engines fetch this rank's blocks; None if this engine only
    fetches.
    """
    secret: str | None
    timeout_s: float
    """Seconds after which waiting for a block times out."""
    max_bytes: int
    """Maximum number of bytes of blocks kept for other engines."""
