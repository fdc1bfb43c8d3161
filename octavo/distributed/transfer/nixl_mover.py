"""Block transfers by NIXL over UCX, in host memory.

A session is an agent's metadata, which contains the addresses of its memory. NIXL's own traffic is
neither encrypted nor authenticated, even if messages use a secret: anyone who has the metadata and
can reach its port can read and write registered memory.
"""

from __future__ import annotations

import base64
import functools
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable
from octavo.distributed.transfer.block_transport import RemoteBytes, split_reads

TIMEOUT_S = 5.0
"""Seconds without progress after which a read fails."""
POLL_S = 50e-6
"""Seconds between polls of a pending read."""
INSTALL = "pip install 'octavo[nixl]'"

logger = logging.getLogger(__name__)


class NixlMover:
    """Implements `block_transport.BlockTransport`."""

    def __init__(self) -> None:
        make_agent, make_config = _agent_classes()
        name = f"octavo-{uuid.uuid4()}"  # a restarted engine is a new agent
        try:
            self._agent: Any = make_agent(name, make_config(backends=["UCX"]))
        except Exception as error:
            raise BackendUnavailable(
                f"kv_transfer: nixl cannot be started: {error}",
                hint="set UCX_TLS=tcp in the environment to use TCP only",
            ) from None
        self._registered: list[Any] = []
        self._remotes: dict[str, str] = {}
        """Names of the connected agents, by session."""

    @functools.cached_property
    def session(self) -> str:
        """Metadata of this agent, after all its memory is registered."""
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def register(self, memory: NDArray[np.uint8]) -> None:
        whole = [(memory.ctypes.data, memory.nbytes, 0, "")]
        try:
            self._registered.append(self._agent.register_memory(whole, "DRAM"))
        except Exception as error:
            raise BackendUnavailable(
                f"kv_transfer: nixl cannot register {memory.nbytes:,} bytes of memory: {error}",
                hint="lower kv_transfer_size",
            ) from None

    def read(self, session: str, ranges: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        pieces = split_reads(ranges)
        own = [(piece.into.ctypes.data, len(piece.into), 0) for piece in pieces]
        theirs = [(piece.address, len(piece.into), 0) for piece in pieces]
        agent, name = self._agent, self._remote(session)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(own, "DRAM"),
            agent.get_xfer_descs(theirs, "DRAM"),
            name,
        )
        state = agent.transfer(handle)
        give_up_at = time.monotonic() + TIMEOUT_S
        # Until the read has finished or failed, it may write to the slots.
        while state == "PROC":
            time.sleep(POLL_S)
            if session in self._remotes and time.monotonic() > give_up_at:
                self._forget(session)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state == "DONE":
            yield from ranges
        else:
            self._forget(session)

    def _remote(self, session: str) -> str:
        """Returns the name of an agent; connects to it first if necessary."""
        if session not in self._remotes:
            name = self._agent.add_remote_agent(base64.b64decode(session))
            self._remotes[session] = name.decode() if isinstance(name, bytes) else name
        return self._remotes[session]

    def _forget(self, session: str) -> None:
        """Closes the connection to an agent, which ends all reads from it."""
        name = self._remotes.pop(session, None)
        if name is not None:
            self._agent.remove_remote_agent(name)

    def close(self) -> None:
        for session in list(self._remotes):
            self._forget(session)
        for memory in self._registered:
            self._agent.deregister_memory(memory)
        self._registered.clear()


def require_nixl() -> None:
    """Raises BackendUnavailable if NIXL cannot be imported."""
    _agent_classes()


def _agent_classes() -> tuple[Any, Any]:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise BackendUnavailable(
            f"kv_transfer: nixl cannot be imported: {error}", hint=INSTALL
        ) from None
    return nixl_agent, nixl_agent_config
