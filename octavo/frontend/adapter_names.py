"""Resolves adapter names to folders, and computes the digests of their contents.

Reads an adapter once to check it and keeps none of its bytes; the worker reads it again when a
request needs it. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from octavo.api.errors import InvalidRequest, SetupError
from octavo.api.lora_request import LoRARequest
from octavo.config.paths import expand_path
from octavo.engine.protocol.step import AdapterRef

MAX_KNOWN = 100_000
"""Maximum number of folders whose digests are remembered."""

ReadDigest = Callable[[Path], bytes]
"""Reads and checks an adapter; returns the digest of its content. Raises a SetupError if it is
invalid.
"""

Signature = tuple[tuple[int, int, int], ...]
"""Identity of files without the device number: inode, size and change time of each."""


class AdapterNames:
    """Adapters that requests of one engine may use."""

    def __init__(self, read: ReadDigest) -> None:
        self._read = read
        self._known: OrderedDict[str, tuple[Signature, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, request: LoRARequest) -> AdapterRef:
        """Returns the adapter of a request; raises InvalidRequest if its files are invalid."""
        path = expand_path(request.lora_path).absolute()
        try:
            digest = self._digest(path, again=request.load_inplace)
        except SetupError as error:
            raise InvalidRequest(
                f"lora_path: {error.message}", hint=error.hint, param="lora_path"
            ) from None
        except OSError as error:
            raise InvalidRequest(
                f"lora_path: {path} cannot be read: {error.strerror}", param="lora_path"
            ) from None
        return AdapterRef(digest, str(path), request.lora_name)

    def _digest(self, path: Path, *, again: bool) -> bytes:
        signature = _signature(path)
        with self._lock:
            known = self._known.get(str(path))
        if known is not None and known[0] == signature and not again:
            return known[1]
        digest = self._read(path)
        with self._lock:
            self._known[str(path)] = (signature, digest)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return digest


def _signature(path: Path) -> Signature:
    """Returns the identity of the files of a folder; () if it is not a folder."""
    if not path.is_dir():
        return ()
    identities = []
    for file in sorted(path.iterdir()):
        if file.name.startswith("adapter_"):
            state = file.stat()
            identities.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(identities)
