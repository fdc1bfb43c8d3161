"""Authentication and encryption of the sockets of engines that exchange KV blocks.

A socket with a secret uses CURVE (CurveZMQ, RFC 26): its long-term key is derived from the secret,
so that only peers that know the secret can connect, and all traffic is encrypted. Without a secret
the socket accepts every connection, so `address.check_address` requires a secret if other machines
can reach it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import zmq
from zmq.utils import z85

HEARTBEAT_MS = 1000
KEY_DOMAIN = b"octavo transfer"


def lock_server(socket: zmq.Socket[Any], secret: str | None) -> None:
    """Restricts a listening socket to peers that know the secret; without a secret, all peers are
    accepted.
    """
    _set_common(socket)
    if secret:
        public, private = _server_keys(secret)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = public, private


def lock_client(socket: zmq.Socket[Any], secret: str | None) -> None:
    """Sets up a connecting socket to prove that it knows the secret."""
    _set_common(socket)
    if secret:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey, _ = _server_keys(secret)


def _set_common(socket: zmq.Socket[Any]) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)


def _server_keys(secret: str) -> tuple[bytes, bytes]:
    private = z85.encode(blake2b(secret.encode(), digest_size=32, person=KEY_DOMAIN).digest())
    return zmq.curve_public(private), private
