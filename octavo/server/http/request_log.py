"""Outermost middleware: assigns request ids and notifies observers of finished requests.

Observers are the access log, the slow request log and the tracer. The id is the client's
X-Request-Id if it is valid, else generated; each response returns it.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http.client import responses
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.outputs import Timings
from octavo.server.http.error_formats import get_error_format
from octavo.server.http.errors import CLIENT_CLOSED_REQUEST, error_response
from octavo.server.http.log_format import ACCESS, FIELDS
from octavo.server.state.request_record import SCOPE_KEY, RequestRecord

ID_HEADER = "X-Request-Id"
FIT_FOR_LOGS = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")

access_logger = logging.getLogger(ACCESS)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """An HTTP request that was answered or whose client disconnected."""

    scope: Scope
    record: RequestRecord
    status: int
    started_s: float
    """Arrival on the monotonic clock, in seconds."""
    duration_s: float

    @property
    def client(self) -> str:
        """Client address; "" on a unix socket."""
        return ":".join(map(str, self.scope.get("client") or ()))

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of its JSON log line."""
        return {
            "request_id": self.record.request_id,
            "client": self.client,
            "key": self.record.owner,
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": self.status,
            "duration_s": round(self.duration_s, 6),
        }

    def timings(self) -> dict[str, Any]:
        """Returns the merged timings of its outputs; {} if none finished."""
        parts = [output.timings for output in self.record.outputs if output.timings is not None]
        if not parts:
            return {}
        merged = Timings.merged(parts)
        return asdict(merged) | {"reason": merged.reason}


Reader = Callable[[FinishedRequest], None]


class RequestLog:
    """ASGI middleware around all others, so that rejected requests are logged too."""

    def __init__(self, app: ASGIApp, readers: Sequence[Reader] = ()) -> None:
        self._app = app
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        client_id = Headers(scope=scope).get(ID_HEADER, "")
        record = RequestRecord(
            client_id if FIT_FOR_LOGS.fullmatch(client_id) else secrets.token_hex(16)
        )
        scope[SCOPE_KEY] = record
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not status:
                await error_response(error, get_error_format(scope))(scope, receive, send_with_id)
            raise
        finally:
            record.release()
            duration_s = time.monotonic() - started_s
            code = status or CLIENT_CLOSED_REQUEST
            self._notify(FinishedRequest(scope, record, code, started_s, duration_s))

    def _notify(self, finished: FinishedRequest) -> None:
        """Notifies all observers; their exceptions are logged."""
        for reader in self._readers:
            try:
                reader(finished)
            except Exception:
                logger.exception("a request could not be logged")


def log_access(finished: FinishedRequest) -> None:
    """Writes a line to the access log."""
    scope, status = finished.scope, finished.status
    phrase = responses.get(status, "Client Gone")
    access_logger.info(
        '%s - "%s %s HTTP/%s" %d %s %.1f ms %s',
        finished.client,
        scope["method"],
        _printable(scope["path"]),
        scope["http_version"],
        status,
        phrase,
        finished.duration_s * 1000,
        " ".join(filter(None, [finished.record.request_id, finished.record.owner])),
        extra={FIELDS: finished.fields},
    )


class SlowLog:
    """Logs requests that took longer than a limit, with their timings."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __call__(self, finished: FinishedRequest) -> None:
        if finished.duration_s < self._limit_s:
            return
        timings = finished.timings()
        logger.warning(
            "slow request %s: %s %s took %.2f s%s",
            finished.record.request_id,
            finished.scope["method"],
            _printable(finished.scope["path"]),
            finished.duration_s,
            _format_timings(timings),
            extra={FIELDS: finished.fields | {"timings": timings}},
        )


def _format_timings(timings: dict[str, Any]) -> str:
    if not timings:
        return ""
    parts = ", ".join(
        f"{name} {timings[f'{name}_s']:.3f} s" for name in ("queued", "prefill", "decode")
    )
    return f": {parts}" + (f" ({timings['reason']})" if timings["reason"] else "")


def _printable(path: str) -> str:
    """Returns a path as printable ASCII, truncated to 500 characters."""
    return path[:500].encode("unicode_escape").decode()
