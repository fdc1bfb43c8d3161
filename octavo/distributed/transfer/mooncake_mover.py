"""Block transfers by Mooncake's transfer engine over TCP, without a metadata server.

Its own traffic is neither encrypted nor authenticated, even if messages use a secret: anyone who
can reach its port can read and write registered memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable
from octavo.distributed.transfer.block_transport import RemoteBytes, split_reads

TIMEOUT_S = 5
"""Seconds without progress after which a transfer fails."""
INSTALL = "pip install mooncake-transfer-engine-non-cuda"

logger = logging.getLogger(__name__)


class MooncakeMover:
    """Implements `block_transport.BlockTransport`."""

    def __init__(self, host: str) -> None:
        """`host` is this machine's address for other engines."""
        self._engine: Any = _engine_class()()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise BackendUnavailable(
                f"kv_transfer: mooncake cannot be started at {host}",
                hint="set kv_transfer_address to an address of this machine",
            )
        self.session: str = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: list[NDArray[np.uint8]] = []

    def register(self, memory: NDArray[np.uint8]) -> None:
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
            raise BackendUnavailable(
                f"kv_transfer: mooncake cannot register {memory.nbytes:,} bytes of memory",
                hint="lower kv_transfer_size",
            )
        self._registered.append(memory)

    def read(self, session: str, ranges: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        pieces = split_reads(ranges)
        status: int = self._engine.batch_transfer_sync_read(
            session,
            [piece.into.ctypes.data for piece in pieces],
            [piece.address for piece in pieces],
            [len(piece.into) for piece in pieces],
        )
        if status == 0:
            yield from ranges

    def close(self) -> None:
        for memory in self._registered:
            self._engine.unregister_memory(memory.ctypes.data)
        self._registered.clear()


def require_mooncake() -> None:
    """Raises BackendUnavailable if Mooncake cannot be imported."""
    _engine_class()


def _engine_class() -> Any:
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(TIMEOUT_S))
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        library = next((word for word in str(error).split() if ".so" in word), None)
        hint = (
            INSTALL if library is None else f"install {library.rstrip(':')} (Debian: libibverbs1)"
        )
        raise BackendUnavailable(
            f"kv_transfer: mooncake cannot be imported: {error}", hint=hint
        ) from None
    return TransferEngine
