"""HTTP client of the CLI commands, for complete and streamed responses.

Benchmarks use `stream_client.py`, which records times. httpx2 is imported with the first client,
since the import takes 0.1 s.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.api.errors import Unavailable, WorkerFailed
from octavo.config.server_url import parse_server_url

if TYPE_CHECKING:
    from httpx2 import Response

TIMEOUT_S = 10.0
"""Timeout of connecting and of GET requests, in seconds."""


class HttpClient:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        import httpx2

        address = parse_server_url(url)
        self.url = str(address)
        self._client = httpx2.Client(
            base_url=self.url,
            headers={"User-Agent": "octavo", "Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            # Loading certificates takes 0.1 s, and plain HTTP needs none.
            verify=ssl.create_default_context() if address.is_tls else False,
            trust_env=False,
            timeout=TIMEOUT_S,
        )

    def get(self, path: str) -> Response:
        """Returns the response, whatever its status; raises Unavailable if the server is not
        reachable.
        """
        with self._describe():
            return self._client.get(path)

    def post(self, path: str, body: Any) -> Response:
        """Sends JSON; returns the response, whatever its status, without a timeout."""
        with self._describe():
            return self._client.post(path, content=msgspec.json.encode(body), timeout=None)

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """Yields the JSON of each event of a stream, without a timeout, since a prompt may be long.
        Raises WorkerFailed if the server returns an error.
        """
        import httpx2

        content = msgspec.json.encode(body)
        with (
            self._describe(),
            self._client.stream("POST", path, content=content, timeout=None) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise WorkerFailed(describe_error(response))
            for event in httpx2.EventSource(response, max_event_size=None):
                if event.data != "[DONE]":
                    yield parse_json(event.data)

    @contextmanager
    def _describe(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except httpx2.HTTPError as error:
            raise Unavailable(
                f"url: no server responds at {self.url}: {_get_reason(error)}",
                hint="start one with `octavo serve`, or set another --url",
            ) from error


def parse_json(text: str | bytes) -> Any:
    """Parses a response or an event; raises WorkerFailed if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise WorkerFailed(
            f"the response is not JSON: {error}",
            hint="check that the URL is the address of an API server",
        ) from error


def describe_error(response: Response) -> str:
    return f"HTTP {response.status_code}: {parse_error_message(response.content)}"


def parse_error_message(body: bytes) -> str:
    """Returns the message of an error body, in OpenAI's format or any other."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _get_reason(error: BaseException) -> str:
    """Returns the operating system's reason, such as "Connection refused", or the client's."""
    cause = error
    while cause.__context__ is not None:
        cause = cause.__context__
    return getattr(cause, "strerror", None) or str(error) or type(error).__name__
