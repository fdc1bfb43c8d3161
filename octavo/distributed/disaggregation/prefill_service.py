"""Computes prompts for other engines, which fetch the blocks from this engine's worker.

Used in one event loop. A peer's prompt is a normal request of this engine, with the priority and
tenant of the original request.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from octavo.api.errors import ConfigError, OctavoError
from octavo.distributed.options import TransferOptions
from octavo.distributed.transfer.address import endpoint, parse_address
from octavo.distributed.transfer.messages import (
    UNREADABLE,
    Accepted,
    Declined,
    Ended,
    FrontReplyMessage,
    FrontRequestMessage,
    Hello,
    Prefill,
    Welcome,
    Withdrawn,
)
from octavo.engine.protocol.kv_messages import TransferFacts
from octavo.frontend.input_processor import RequestContext
from octavo.frontend.remote_prefill import ComputePrompt
from octavo.utils.secure_sockets import lock_server

logger = logging.getLogger(__name__)


class PrefillService:
    """Serves prefill requests of other engines."""

    def __init__(
        self, options: TransferOptions, facts: TransferFacts, compute: ComputePrompt
    ) -> None:
        self._options = options
        self._facts = facts
        self._compute = compute
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._prompts: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        """Prompts that are being computed, by the peer's identity and the peer's request id."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._requests = msgspec.msgpack.Decoder(FrontRequestMessage)

    def start(self) -> None:
        """Starts to listen in the running event loop; raises ConfigError if the port is in use."""
        if self._task is not None:
            return
        host, port = parse_address(self._options.kv_transfer_address, name="kv_transfer_address")
        self._socket = self._context.socket(zmq.ROUTER)
        lock_server(self._socket, self._options.kv_transfer_secret)
        try:
            self._socket.bind(endpoint(host, port))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_transfer_address: cannot listen on {host}:{port}: {error}",
                hint="use an address of this machine and a free port",
            ) from error
        self._task = asyncio.create_task(self._listen(self._socket))

    def close(self) -> None:
        """Stops listening; call it in the loop's thread, or after the loop has ended."""
        for task in [*self._prompts.values(), *([self._task] if self._task else [])]:
            if not task.get_loop().is_closed():
                task.cancel()
        self._context.destroy(linger=0)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            try:
                message = self._requests.decode(frames[0] if len(frames) == 1 else b"")
            except UNREADABLE as error:
                logger.warning("a peer sent an invalid message: %s", error)
                continue
            if isinstance(message, Hello):
                assert self._facts.listen is not None
                self._send(peer, Welcome(self._facts.facts, self._facts.listen))
            elif isinstance(message, Withdrawn):
                withdrawn = self._prompts.pop((peer, message.request_id), None)
                if withdrawn is not None:
                    withdrawn.cancel()
            else:
                self._begin(peer, message)

    def _begin(self, peer: bytes, message: Prefill) -> None:
        key = peer, message.request_id
        task = self._prompts[key] = asyncio.create_task(self._serve(peer, message))

        def forget(ended: asyncio.Task[None]) -> None:
            if self._prompts.get(key) is ended:
                del self._prompts[key]

        task.add_done_callback(forget)

    async def _serve(self, peer: bytes, message: Prefill) -> None:
        name, origin = message.request_id, RequestContext(message.priority, message.tenant)
        try:
            computing = self._compute(message.token_ids, message.cache_salt, origin)
        except Exception as error:
            self._send(peer, Declined(name, _reason(error)))
            return
        self._send(peer, Accepted(name))
        try:
            output = await computing
        except Exception as error:
            self._send(peer, Ended(name, 0, _reason(error)))
        else:
            self._send(peer, Ended(name, output.num_cached_tokens or 0, output.error))

    def _send(self, peer: bytes, message: FrontReplyMessage) -> None:
        """Sends a message to a peer; ignored if the peer has disconnected."""
        assert self._socket is not None
        self._socket.send_multipart([peer, self._encode(message)], zmq.NOBLOCK)


def _reason(error: Exception) -> str:
    """Returns the reason why a prompt was not computed; also logs it if the error is this
    engine's.
    """
    if isinstance(error, OctavoError):
        return error.message
    logger.error("remote prefill for another engine failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
