"""A small client of a server's HTTP API: whole answers, and events as they come.

On the standard library, which is imported quickly; `stream_client.py` is the one for measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config.server_url import parse_server_url
from octavo.errors import Unavailable, WorkerFailed

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

TIMEOUT_S = 10.0
"""Time that a server has to connect or to answer a GET, in seconds."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole answer to one GET."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Returns the body's content; raises WorkerFailed where it is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError as error:
            raise WorkerFailed(f"the answer is no JSON: {error}") from error

    def refusal(self) -> str:
        """Returns the message of an error's body, in OpenAI's form or any other."""
        try:
            message = msgspec.json.decode(self.body)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError):
            message = self.body[:200].decode(errors="replace") or "no reason given"
        return f"HTTP {self.status}: {message}"


class HttpClient:
    """A client of one server; each request has a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._address = parse_server_url(url)
        self.url = str(self._address)
        self._headers = {"User-Agent": "octavo", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> HttpAnswer:
        """Returns the answer, of any status; raises Unavailable where none comes."""
        with self._exchange("GET", path, None, timeout=TIMEOUT_S) as response:
            return HttpAnswer(response.status, response.read())

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """Yields the JSON of each event of a stream; raises WorkerFailed where the server refuses.

        Waits for the next event as long as it takes: a prompt may be long.
        """
        content = msgspec.json.encode(body)
        with self._exchange("POST", path, content, timeout=None) as response:
            if response.status != 200:
                raise WorkerFailed(HttpAnswer(response.status, response.read()).refusal())
            for line in response:
                payload = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and payload != b"[DONE]":
                    yield HttpAnswer(200, payload).json()

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None, *, timeout: float | None
    ) -> Iterator[HTTPResponse]:
        from http.client import HTTPException

        connection = self._connection(timeout)
        try:
            connection.request(method, self._address.path + path, body, self._headers)
            yield connection.getresponse()
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unavailable(
                f"url: no server answers at {self.url}: {reason}",
                hint="start one with `octavo serve`, or name another with --url",
            ) from error
        finally:
            connection.close()

    def _connection(self, timeout: float | None) -> HTTPConnection:
        from http.client import HTTPConnection, HTTPSConnection

        kind = HTTPSConnection if self._address.is_tls else HTTPConnection
        return kind(self._address.host, self._address.port, timeout=timeout)
