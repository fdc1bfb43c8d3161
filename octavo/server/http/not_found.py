"""Error messages for 404 and 405 with suggestions."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from octavo.api.errors import shown

VERSION = "v1"
"""Path component that is most often missing or duplicated."""
LIST = "GET /openapi.json lists the routes"


def add_suggestions(
    error: HTTPException, request: Request, routes: Sequence[BaseRoute]
) -> HTTPException:
    """Adds suggestions to FastAPI's 404 and 405; returns other errors unchanged."""
    if error.detail != HTTPStatus(error.status_code).phrase:
        return error
    known = [route for route in routes if isinstance(route, Route)]
    if error.status_code == HTTPStatus.NOT_FOUND:
        return HTTPException(error.status_code, _no_route(request, known))
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_methods(request.scope, known))
        said = f"{request.method} {shown(request.url.path)}: no such method, allowed: {allowed}"
        return HTTPException(error.status_code, said, {"Allow": allowed})
    return error


def _no_route(request: Request, routes: list[Route]) -> str:
    """Suggests routes with the same path, with or without its version."""
    path = request.scope["path"]
    meant = [
        f"{method} {route.path}"
        for route in routes
        if _without_version(route.path) == _without_version(path)
        for method in sorted(route.methods or ())
        if method == request.method
    ]
    hint = f"did you mean {meant[0]}?" if meant else LIST
    return f"{request.method} {shown(path)}: no such route (hint: {hint})"


def _without_version(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", VERSION)]


def _methods(scope: Scope, routes: list[Route]) -> list[str]:
    """Returns the methods of all routes with this path."""
    taking = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in taking for method in route.methods or ()})
