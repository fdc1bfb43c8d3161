"""One table from errors to HTTP statuses and OpenAI error types.

OpenAI's body: {"error": {"message", "type", "param", "code"}}, where code is the HTTP status; other
APIs' are in `error_forms.py`. Source of the names: vLLM's.
"""

from __future__ import annotations

import http
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octavo.api import errors
from octavo.server.http.error_forms import ErrorForm, Fault, Overflow, form_of, openai_form
from octavo.server.http.unanswered import explained

TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.Unauthorized, 401, "AuthenticationError"),
    (errors.ModelNotFound, 404, "NotFoundError"),
    (errors.RequestNotFound, 404, "NotFoundError"),
    (errors.Overloaded, 429, "RateLimitError"),
    (errors.ClientError, 400, "BadRequestError"),
    (errors.Unavailable, 503, "ServiceUnavailableError"),
    (errors.NotOnHub, 404, "NotFoundError"),
    (errors.GatedModel, 403, "PermissionDeniedError"),
    (errors.DiskFull, 507, "InsufficientStorageError"),
    (errors.DownloadFailed, 502, "BadGatewayError"),
    (errors.ServerError, 500, "InternalServerError"),
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
    504: "RequestTimeoutError",
}
"""Error types of HTTPExceptions, which the framework and the body's reader raise."""

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client has gone, for the access log; the name is nginx'."""


def fault_of(error: Exception) -> Fault:
    """Returns what clients are told of an error; one that is not ours shows nothing of its
    inside.
    """
    if isinstance(error, HTTPException):
        kind = TYPES_BY_STATUS.get(
            error.status_code, http.HTTPStatus(error.status_code).phrase.replace(" ", "") + "Error"
        )
        return Fault(error.detail, kind, error.status_code)
    if isinstance(error, RequestValidationError):
        error = _described(error)
    for known, status, kind in TABLE:
        if isinstance(error, known):
            param = getattr(error, "param", None)
            return Fault(_message(error), kind, status, param, _overflow(error))
    return Fault("Internal server error", "InternalServerError", 500)


def error_body(error: Exception) -> dict[str, Any]:
    """Returns OpenAI's JSON body of an error."""
    return openai_form(fault_of(error))


def error_response(error: Exception, form: ErrorForm = openai_form) -> Response:
    fault = fault_of(error)
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
    """Answers an app's errors; one that no route answers is told of the routers' routes."""
    routes = [route for router in routers for route in router.routes]

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = explained(error, request, routes)
        return error_response(error, form_of(request.scope))

    async def answer_nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, answer_nobody)
    for kind in (errors.OctavoError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


@contextmanager
def use_api_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field that an error is about; `names` maps the API's names to ours."""
    try:
        yield
    except errors.ClientError as error:
        for theirs, ours in names.items():
            if error.param == ours:
                error.param = theirs
                error.message = error.message.replace(f"{ours}:", f"{theirs}:", 1)
                break
        raise


def _described(error: RequestValidationError) -> errors.InvalidRequest:
    """Returns the first fault of what the framework checks: parameters of a path or a query."""
    first = error.errors()[0]
    name, said = str(first["loc"][-1]), first["msg"]
    if first["type"] == "missing":
        return errors.InvalidRequest(f"{name}: needed, and not given", param=name)
    return errors.InvalidRequest(
        f"{name}: got {errors.shown(first['input'])}, {said[:1].lower()}{said[1:]}", param=name
    )


def _overflow(error: Exception) -> Overflow | None:
    if isinstance(error, errors.ContextTooLong) and error.num_tokens:
        return Overflow(error.num_tokens, error.max_tokens)
    return None


def _message(error: Exception) -> str:
    if isinstance(error, errors.OctavoError):
        return f"{error.message} (hint: {error.hint})" if error.hint else error.message
    return str(error)
