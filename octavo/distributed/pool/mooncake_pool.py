"""Client of a Mooncake store: a master that locates values, and nodes that store them.

Its traffic is neither encrypted nor authenticated: anyone who can reach the master or a node can
read and change values.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.distributed.transfer.address import parse_address

SCHEME = "mooncake://"
CONNECT_S = 5.0
"""Timeout for connecting to the master, in seconds."""
BUFFER_BYTES = 16 << 20
"""Bytes of the client's own buffer."""
INSTALL = "pip install mooncake-transfer-engine-non-cuda"


@dataclass(frozen=True, slots=True)
class StoreValue:
    """A key, and the registered memory for its value."""

    key: str
    data: NDArray[np.uint8]
    is_pinned: bool = False
    """Whether the store should evict it last."""


class MooncakePool:
    """Values by key. Any method may raise an exception, which callers treat as a miss."""

    def __init__(self, master: str, *, lends_bytes: int, num_replicas: int) -> None:
        """`master`: HOST:PORT. `lends_bytes`: memory that this engine adds to the pool."""
        store_class, self._replicate_config, self._soft_pin = _classes()
        host = _own_address(master)
        self._num_replicas = num_replicas
        self._store: Any = store_class()
        # metadata server, memory for the pool, own memory, protocol, devices, master
        places = ("P2PHANDSHAKE", lends_bytes, BUFFER_BYTES, "tcp", "", master)
        status = self._store.setup(host, *places)
        if status != 0:
            raise BackendUnavailable(
                f"kv_pool: the master at {master} rejected this client: status {status}",
                hint="see the log of mooncake_master",
            )

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Registers memory for values; it must outlive the store."""
        if self._store.register_buffer(memory.ctypes.data, memory.nbytes) != 0:
            raise BackendUnavailable(f"kv_pool: mooncake cannot register {memory.nbytes:,} bytes")

    def put(self, values: Sequence[StoreValue]) -> list[bool]:
        """Stores values; returns for each whether it is in the store afterwards."""
        stored: dict[str, bool] = {}
        for is_pinned in (False, True):
            some = [value for value in values if value.is_pinned is is_pinned]
            if some:
                results = self._store.batch_put_from(*_arguments(some), self._config(is_pinned))
                stored |= {
                    value.key: status == 0 for value, status in zip(some, results, strict=True)
                }
        return [stored[value.key] for value in values]

    def get(self, values: Sequence[StoreValue]) -> list[bool]:
        """Reads values, which must have exactly the expected sizes; returns for each whether it was
        read.
        """
        if not values:
            return []
        results = self._store.batch_get_into(*_arguments(values))
        return [
            num_bytes == len(value.data) for value, num_bytes in zip(values, results, strict=True)
        ]

    def remove(self, key: str) -> None:
        self._store.remove(key)

    def remove_all(self, prefix: str) -> None:
        """Removes all keys with a prefix."""
        self._store.remove_by_regex(f"^{re.escape(prefix)}")

    def close(self) -> None:
        self._store.close()

    def _config(self, is_pinned: bool) -> Any:
        config = self._replicate_config()
        config.replica_num = self._num_replicas
        if is_pinned:
            config.soft_pin_action = self._soft_pin.ENABLE
        return config


def check_pool(text: str) -> str:
    """Returns the master's HOST:PORT. Raises ConfigError if it is not set or nothing listens there,
    BackendUnavailable if Mooncake cannot be imported.
    """
    if not text.startswith(SCHEME):
        raise ConfigError(
            f"kv_pool: got {text!r}, expected mooncake://HOST:PORT",
            hint="use the address of a mooncake_master",
        )
    master = text.removeprefix(SCHEME)
    parse_address(master, name="kv_pool")
    _classes()
    _own_address(master)
    return master


def _arguments(values: Sequence[StoreValue]) -> tuple[list[str], list[int], list[int]]:
    """Returns keys, addresses and sizes."""
    return (
        [value.key for value in values],
        [value.data.ctypes.data for value in values],
        [len(value.data) for value in values],
    )


def _own_address(master: str) -> str:
    """Returns this machine's address on the network of the master."""
    host, port = parse_address(master, name="kv_pool")
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            own: str = connection.getsockname()[0]
            return own
    except OSError as error:
        raise ConfigError(
            f"kv_pool: no response from {master} within {CONNECT_S:g} s: {error}",
            hint="start one: mooncake_master --rpc_port=50051",
        ) from error


def _classes() -> tuple[Any, Any, Any]:
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
    except ImportError as error:
        library = next((word for word in str(error).split() if ".so" in word), None)
        hint = (
            INSTALL if library is None else f"install {library.rstrip(':')} (Debian: libibverbs1)"
        )
        raise BackendUnavailable(
            f"kv_pool: mooncake cannot be imported: {error}", hint=hint
        ) from None
    return MooncakeDistributedStore, ReplicateConfig, SoftPinAction
