"""A server on 127.0.0.1 with the hub's routes that a download uses, and the faults of a network."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789abcdef0123456789abcdef01234567"
ROOM = 1 << 16


@dataclass
class HubRepository:
    """A repository's files, what goes wrong with them, and what was asked for."""

    name: str
    small: dict[str, bytes]
    large: dict[str, bytes]
    cuts: list[int] = field(default_factory=list)
    """Bytes of a large file's body after which the connection breaks, one for each request."""
    damaged: set[str] = field(default_factory=set)
    status: int = 200
    ranges: list[str] = field(default_factory=list)
    """Range of each request for a large file, "" for the whole."""
    sent_bytes: int = 0
    url: str = ""

    def etag(self, file: str) -> str:
        if file in self.large:
            return hashlib.sha256(self.large[file]).hexdigest()
        content = self.small[file]
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

    def card(self) -> bytes:
        siblings: list[dict[str, object]] = [
            {"rfilename": name, "size": len(content), "blobId": self.etag(name)}
            for name, content in self.small.items()
        ]
        for name, content in self.large.items():
            lfs = {"sha256": self.etag(name), "size": len(content), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(content), "blobId": "x", "lfs": lfs})
        return json.dumps({"id": self.name, "sha": REVISION, "siblings": siblings}).encode()

    def tree(self) -> bytes:
        files = {**self.small, **self.large}
        rows = [
            {"type": "file", "path": name, "size": len(content), "oid": self.etag(name)}
            for name, content in files.items()
        ]
        return json.dumps(rows).encode()

    def body(self, file: str) -> bytes:
        content = self.large.get(file, self.small.get(file, b""))
        return content[:-1] + bytes([content[-1] ^ 1]) if file in self.damaged else content


@contextmanager
def live_hub(repository: HubRepository) -> Iterator[HubRepository]:
    """Serves a repository; `url` is its HF_ENDPOINT."""

    class Handler(HubHandler):
        served = repository

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    repository.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield repository
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class HubHandler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    served: HubRepository
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        """Answers the size and hash of a file."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answers a file, or what the repository holds."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        hub = self.served
        path = self.path.partition("?")[0]
        if hub.status != 200 or hub.name not in path:
            self._send(hub.status if hub.status != 200 else 404, b"{}")
        elif path.startswith("/api/models/"):
            self._send(200, hub.tree() if "/tree/" in path else hub.card())
        else:
            file = path.partition(f"/resolve/{REVISION}/")[2] or path.partition("/resolve/main/")[2]
            if file in hub.small or file in hub.large:
                self._file(file, with_body=with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, file: str, *, with_body: bool) -> None:
        hub = self.served
        body = hub.body(file)
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hub.etag(file)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if with_body:
            self._write(file, wanted, body[start:])

    def _write(self, file: str, wanted: str, body: bytes) -> None:
        hub = self.served
        if file in hub.large:
            hub.ranges.append(wanted)
            if hub.cuts:
                body = body[: hub.cuts.pop(0)]
                self.close_connection = True
            hub.sent_bytes += len(body)
        self.wfile.write(body)
