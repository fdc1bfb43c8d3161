"""Time limit of requests, from arrival to the last byte.

ASGI middleware for POST. A response that has not begun becomes a 504; a stream ends with an error
at the deadline in the scope.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.error_formats import get_error_format
from octavo.server.http.errors import error_response

DEADLINE = "octavo_deadline"
"""Key of the ASGI scope for the request's Deadline."""


@dataclass(frozen=True, slots=True)
class Deadline:
    at_s: float | None = None
    """Time on the event loop's clock, in seconds; None: no limit."""
    limit_s: float = 0

    @property
    def error(self) -> HTTPException:
        return HTTPException(
            504,
            f"the request took longer than {self.limit_s:g} seconds (hint: request fewer tokens)",
        )


class TimeLimit:
    """ASGI middleware that cancels requests at their deadline."""

    def __init__(self, app: ASGIApp, limit_s: float) -> None:
        self._app = app
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        now_s = asyncio.get_running_loop().time()
        deadline = scope[DEADLINE] = Deadline(now_s + self._limit_s, self._limit_s)
        try:
            async with asyncio.timeout_at(deadline.at_s) as timeout:

                async def send_in_time(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        timeout.reschedule(None)  # a stream enforces the deadline itself
                    await send(message)

                await self._app(scope, receive, send_in_time)
        except TimeoutError:
            if not timeout.expired():
                raise
            await error_response(deadline.error, get_error_format(scope))(scope, receive, send)
