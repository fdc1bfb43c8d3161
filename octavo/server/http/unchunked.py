"""Answers of unknown length to clients of HTTP/1.0, which know no chunks: the connection's end is
the answer's.

Source: RFC 9112, sections 6.1 and 6.3. uvicorn sends chunks whatever the client's version is.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Returns the app with an answer that `cycle` sends as it is, and then closes."""

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
