"""GET / and GET /web/NAME: the web page, with static files from `octavo/server/web`.

The files are public and need no key: the page itself prompts for one. A strict
Content-Security-Policy blocks everything else.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "web"
FILES_PATH = "/web"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every file. Browsers revalidate each time and get a 304 for unchanged files."""

router = APIRouter()


class PageFiles(StaticFiles):
    """Static files of the page, with their headers; other names are a 404."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        if response.status_code != 304:
            response.headers["Content-Type"] = MEDIA_TYPES[Path(full_path).suffix]
        return response


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    return await PageFiles().get_response("index.html", request.scope)


router.mount(FILES_PATH, PageFiles(), name="page")
