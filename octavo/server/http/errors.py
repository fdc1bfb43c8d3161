"""Maps errors to HTTP statuses and OpenAI error types.

OpenAI's body is {"error": {"message", "type", "param", "code"}}, where code is the HTTP status;
other APIs' bodies are in `error_formats.py`. Names are vLLM's.
"""

from __future__ import annotations

import http
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from octavo.api import errors
from octavo.api.errors import shown
from octavo.server.http.error_formats import (
    ErrorFormat,
    Fault,
    Overflow,
    format_openai_error,
    get_error_format,
)

VERSION = "v1"
"""Path component that clients most often omit or duplicate."""
LIST = "see GET /openapi.json"
TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.Unauthorized, 401, "AuthenticationError"),
    (errors.ModelNotFound, 404, "NotFoundError"),
    (errors.RequestNotFound, 404, "NotFoundError"),
    (errors.SessionNotFound, 404, "NotFoundError"),
    (errors.Overloaded, 429, "RateLimitError"),
    (errors.ClientError, 400, "BadRequestError"),
    (errors.Unavailable, 503, "ServiceUnavailableError"),
    (errors.NotOnHub, 404, "NotFoundError"),
    (errors.GatedModel, 403, "PermissionDeniedError"),
    (errors.DiskFull, 507, "InsufficientStorageError"),
    (errors.DownloadFailed, 502, "BadGatewayError"),
    (errors.ServerError, 500, "InternalServerError"),
)
"""Rows of (error, status, type); the first match counts."""

TYPES_BY_STATUS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    504: "RequestTimeoutError",
}
"""Error types of HTTPExceptions by status."""

CLIENT_CLOSED_REQUEST = 499
"""Status in the access log if the client has disconnected, as in nginx."""


def make_fault(error: Exception) -> Fault:
    """Converts an error for clients; unexpected exceptions reveal no details."""
    if isinstance(error, HTTPException):
        kind = TYPES_BY_STATUS.get(
            error.status_code, http.HTTPStatus(error.status_code).phrase.replace(" ", "") + "Error"
        )
        return Fault(error.detail, kind, error.status_code)
    if isinstance(error, RequestValidationError):
        error = _convert_validation_error(error)
    for known, status, kind in TABLE:
        if isinstance(error, known):
            param = getattr(error, "param", None)
            return Fault(_message(error), kind, status, param, _overflow(error))
    return Fault("Internal server error", "InternalServerError", 500)


def error_body(error: Exception) -> dict[str, Any]:
    """Returns OpenAI's JSON body of an error."""
    return format_openai_error(make_fault(error))


def error_response(error: Exception, form: ErrorFormat = format_openai_error) -> Response:
    fault = make_fault(error)
    body = form(fault)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, errors.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if "request_id" in body:
        headers["request-id"] = body["request_id"]
    return Response(msgspec.json.encode(body), fault.status, headers, "application/json")


def add_error_handlers(app: FastAPI, routers: Iterable[APIRouter] = ()) -> None:
    """Adds handlers for an app's errors; 404 and 405 suggest routes of the routers."""
    routes = [route for router in routers for route in router.routes]

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = add_suggestions(error, request, routes)
        return error_response(error, get_error_format(request.scope))

    async def respond_disconnected(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, respond_disconnected)
    for kind in (errors.OctavoError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


@contextmanager
def use_api_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the invalid field in errors; `names` maps the API's names to ours."""
    try:
        yield
    except errors.ClientError as error:
        for theirs, ours in names.items():
            if error.param == ours:
                error.param = theirs
                error.message = error.message.replace(f"{ours}:", f"{theirs}:", 1)
                break
        raise


def _convert_validation_error(error: RequestValidationError) -> errors.InvalidRequest:
    """Converts FastAPI's first validation error of path or query parameters."""
    first = error.errors()[0]
    name, message = str(first["loc"][-1]), first["msg"]
    if first["type"] == "missing":
        return errors.InvalidRequest(f"{name}: field required", param=name)
    return errors.InvalidRequest(
        f"{name}: got {errors.shown(first['input'])}, {message[:1].lower()}{message[1:]}",
        param=name,
    )


def _overflow(error: Exception) -> Overflow | None:
    if isinstance(error, errors.ContextTooLong) and error.num_tokens:
        return Overflow(error.num_tokens, error.max_tokens)
    return None


def _message(error: Exception) -> str:
    if isinstance(error, errors.OctavoError):
        return f"{error.message} (hint: {error.hint})" if error.hint else error.message
    return str(error)


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
        message = (
            f"{request.method} {shown(request.url.path)}: method not allowed, expected {allowed}"
        )
        return HTTPException(error.status_code, message, {"Allow": allowed})
    return error


def _no_route(request: Request, routes: list[Route]) -> str:
    """Suggests routes with the same path, with or without its version."""
    path = request.scope["path"]
    similar = [
        f"{method} {route.path}"
        for route in routes
        if _without_version(route.path) == _without_version(path)
        for method in sorted(route.methods or ())
        if method == request.method
    ]
    hint = f"did you mean {similar[0]}?" if similar else LIST
    return f"{request.method} {shown(path)}: route not found (hint: {hint})"


def _without_version(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", VERSION)]


def _methods(scope: Scope, routes: list[Route]) -> list[str]:
    taking = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in taking for method in route.methods or ()})
