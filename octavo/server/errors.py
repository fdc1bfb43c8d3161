"""One table from errors to HTTP statuses and OpenAI error types, and one body for all of them.

Body: {"error": {"message", "type", "param", "code"}}, where code is the HTTP status. Source of the
names: vLLM's.
"""

from __future__ import annotations

import http
import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octavo import errors

TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.Unauthorized, 401, "AuthenticationError"),
    (errors.ModelNotFound, 404, "NotFoundError"),
    (errors.RequestNotFound, 404, "NotFoundError"),
    (errors.Overloaded, 429, "RateLimitError"),
    (errors.ClientError, 400, "BadRequestError"),
    (errors.Unavailable, 503, "ServiceUnavailableError"),
    (errors.ServerError, 500, "InternalServerError"),
    (RequestValidationError, 422, "UnprocessableEntityError"),
)
"""Rows of (error, status, type); the first that fits counts."""

TYPES_BY_STATUS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
}
"""Error types of HTTPExceptions, which the framework and the body's reader raise."""

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client has gone, for the access log; the name is nginx'."""


def error_body(error: Exception) -> dict[str, Any]:
    """Returns the JSON body of an error; one that is not ours shows nothing of its inside."""
    if isinstance(error, HTTPException):
        kind = TYPES_BY_STATUS.get(
            error.status_code, http.HTTPStatus(error.status_code).phrase.replace(" ", "") + "Error"
        )
        return _body(error.detail, kind, error.status_code)
    for known, status, kind in TABLE:
        if isinstance(error, known):
            return _body(_message(error), kind, status, getattr(error, "param", None))
    return _body("Internal server error", "InternalServerError", 500)


def error_response(error: Exception) -> Response:
    body = error_body(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, errors.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(msgspec.json.encode(body), body["error"]["code"], headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def answer_nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, answer_nobody)
    for kind in (errors.OctavoError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def _message(error: Exception) -> str:
    if isinstance(error, errors.OctavoError):
        return f"{error.message} (hint: {error.hint})" if error.hint else error.message
    return str(error)


def _body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
