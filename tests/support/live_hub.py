"""A server on 127.0.0.1 with the hub's routes that a download uses, and the faults of a network."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubRepository:
    """A repository's files, what goes wrong with them, and what was asked for."""

    name: str
    small: dict[str, bytes]
    large: dict[str, bytes]
    cuts: list[int] = field(default_factory=list)
    """Bytes of a large file's body after which the connection breaks, one for each request."""
    damaged: set[str] = field(default_factory=set)
    is_gated: bool = False
    has_store: bool = False
    """Whether large files are answered by a redirect to another host, as the hub's are."""
    pace_s: float = 0.0
    """Seconds between the megabytes of a large file."""
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
def live_hub(repository: HubRepository, *others: HubRepository) -> Iterator[HubRepository]:
    """Serves repositories; the `url` of the first is their HF_ENDPOINT."""

    class Handler(HubHandler):
        served = (repository, *others)

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

    served: tuple[HubRepository, ...]
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
        path = unquote(self.path.partition("?")[0])
        broken = next((hub.status for hub in self.served if hub.status != 200), None)
        found = [hub for hub in self.served if f"/{hub.name}/" in f"{path}/"]
        if broken is not None or not found:
            self._send(broken or 404, b"{}", "RepoNotFound" if broken in (None, 404) else "")
            return
        (hub,) = found
        if path.startswith("/api/models/"):
            revision = path.partition("/revision/")[2]
            if revision not in ("", "main", REVISION):
                self._send(404, b"{}", "RevisionNotFound")
                return
            self._send(200, hub.tree() if "/tree/" in path else hub.card())
            return
        file = path.partition(f"/resolve/{REVISION}/")[2] or path.partition("/resolve/main/")[2]
        file = file or path.partition("/store/")[2]
        if file not in hub.small and file not in hub.large:
            self._send(404, b"", "EntryNotFound")
        elif hub.is_gated:
            self._send(403, b"", "GatedRepo")
        elif hub.has_store and file in hub.large and "/store/" not in path:
            self._redirect(hub, file)
        else:
            self._file(hub, file, with_body=with_body)

    def _redirect(self, hub: HubRepository, file: str) -> None:
        self.send_response(302)
        port = hub.url.rpartition(":")[2]
        self.send_header("Location", f"http://localhost:{port}/{hub.name}/store/{quote(file)}")
        self.send_header("X-Linked-Etag", f'"{hub.etag(file)}"')
        self.send_header("X-Linked-Size", str(len(hub.large[file])))
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, body: bytes, error: str = "") -> None:
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, hub: HubRepository, file: str, *, with_body: bool) -> None:
        body = hub.body(file)
        if "/store/" in self.path and "Authorization" in self.headers:
            self._send(400, b"a token is for the hub alone")
            return
        wanted = self.headers.get("Range", "")
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first or 0), min(int(last or len(body) - 1) + 1, len(body))
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hub.etag(file)}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
        self.end_headers()
        if with_body:
            self._write(hub, file, wanted, body[start:end])

    def _write(self, hub: HubRepository, file: str, wanted: str, body: bytes) -> None:
        if file not in hub.large:
            self.wfile.write(body)
            return
        hub.ranges.append(wanted)
        if hub.cuts:
            body = body[: hub.cuts.pop(0)]
            self.close_connection = True
        for start in range(0, len(body), 1 << 20):
            time.sleep(hub.pace_s)
            self.wfile.write(body[start : start + (1 << 20)])
            hub.sent_bytes += len(body[start : start + (1 << 20)])
