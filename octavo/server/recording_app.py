"""The server of `octavo replay --serve`: the page, showing a recording.

It has no model and serves no generation requests.
"""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.http.errors import add_error_handlers
from octavo.server.http.head_requests import HeadAsGet
from octavo.server.http.listener import listen_on_port
from octavo.server.routes import page, recording
from octavo.server.state.shown_recording import ShownRecording
from octavo.utils.version import __version__

QUERY = b"recording"
"""Query string that tells the page to show a recording."""


class AddQuery:
    """ASGI middleware that redirects / to the page's view of a recording."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/" and scope["query_string"] != QUERY:
            headers = [(b"location", b"/?" + QUERY), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


def create_recording_app(shown: ShownRecording) -> FastAPI:
    app = FastAPI(title="Octavo, a recording", version=__version__, docs_url=None, redoc_url=None)
    app.state.recording = shown
    routers = (recording.router, page.router)
    for router in routers:
        app.include_router(router)
    add_error_handlers(app, routers)
    app.add_middleware(AddQuery)
    app.add_middleware(HeadAsGet)
    return app


def serve_recording(shown: ShownRecording, host: str, port: int) -> None:
    """Serves a recording until Ctrl-C."""
    listener = listen_on_port(host, port)
    name, number = listener.getsockname()[:2]
    address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
    print(f"showing {shown.name} on http://{address}", flush=True)
    shown.start()
    config = uvicorn.Config(create_recording_app(shown), log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])
