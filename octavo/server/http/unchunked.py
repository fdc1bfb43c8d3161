"""Responses of unknown length for HTTP/1.0 clients, which do not support chunked encoding: the end
of the connection ends the response.

Source: RFC 9112, sections 6.1 and 6.3. uvicorn sends chunks to all clients.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wraps an app so that `cycle` sends its response unchunked and then closes the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open_ended = False

        async def send_plainly(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_open_ended = b"content-length" not in names
                if is_open_ended:
                    cycle.chunked_encoding = False
            elif is_open_ended:
                # The cycle compares each part with what a Content-Length would leave.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
