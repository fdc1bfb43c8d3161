"""The server's listening socket (TCP or unix) and TLS certificate, checked before a model loads."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from octavo.api.errors import ConfigError
from octavo.server.settings import ServerSettings

BACKLOG = 2048


def listen(settings: ServerSettings) -> socket.socket:
    """Opens the configured socket; raises ConfigError if that fails."""
    check_certificate(settings)
    if settings.uds is not None:
        return listen_on_path(settings.uds)
    return listen_on_port(settings.host, settings.port)


def listen_on_port(host: str, port: int) -> socket.socket:
    """Opens a TCP socket; raises ConfigError for a port in use or an invalid address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="set another --port or --host",
        ) from error
    return listener


def listen_on_path(path: str) -> socket.socket:
    """Opens a unix socket; replaces a stale one."""
    try:
        if os.path.lexists(path):
            _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"uds: cannot listen on {path}: {error.strerror or error}",
            hint="set another --uds path",
        ) from error
    return listener


def remove_socket(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()


def check_certificate(settings: ServerSettings) -> None:
    """Raises ConfigError if the TLS files are not usable."""
    if settings.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With an empty password, an encrypted key fails instead of prompting on the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile: cannot load {settings.ssl_certfile} with the key of"
            f" {settings.ssl_keyfile or 'the same file'}: {error}",
            hint="use a PEM certificate chain and its PEM key without a password",
        ) from error


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(Path(path).lstat().st_mode):
        raise ConfigError(f"uds: {path} exists and is not a socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise ConfigError(f"uds: another server listens on {path}", hint="choose another path")
