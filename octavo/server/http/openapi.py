"""Adds request bodies, stream types and error formats to the OpenAPI description, which FastAPI
cannot derive.

Routes parse their bodies with `body.parse_body` and write responses themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

from octavo.server.http.body import Body
from octavo.server.http.error_formats import Fault, get_error_format

REFERENCE = "$ref"
EXAMPLE = Fault("a message", "AType", 400)


def describe(router: APIRouter) -> None:
    """Adds request bodies, streams and errors to a router's routes."""
    for route in router.routes:
        if not isinstance(route, APIRoute):
            continue
        route.responses.update(error_responses(route.path))
        kind = _get_body(route)
        if kind is None:
            continue
        route.openapi_extra = {"requestBody": request_body(kind)}
        if kind.stream_type is not None and "stream" in kind.model_fields:
            route.responses[200] = {"content": {kind.stream_type: {}}}


def get_bodies(router: APIRouter) -> dict[str, type[Body]]:
    """Returns the body classes of routes, by "METHOD path"."""
    return {
        f"{method} {route.path}": kind
        for route in router.routes
        if isinstance(route, APIRoute) and (kind := _get_body(route)) is not None
        for method in sorted(route.methods or ())
    }


def _get_body(route: APIRoute) -> type[Body] | None:
    kinds = (getattr(dependency.call, "kind", None) for dependency in route.dependant.dependencies)
    return next((kind for kind in kinds if kind is not None), None)


def error_responses(path: str) -> dict[int | str, dict[str, Any]]:
    """Returns OpenAPI's description of a route's errors."""
    form = get_error_format({"type": "http", "path": path, "headers": []})
    content = {"application/json": {"schema": _make_schema(form(EXAMPLE))}}
    return {
        "4XX": {"description": "The request is invalid.", "content": content},
        "5XX": {"description": "The server failed or is overloaded.", "content": content},
    }


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns OpenAPI's description of a JSON body, with references inlined."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})
    return {
        "required": True,
        "content": {"application/json": {"schema": _inline_references(schema, parts)}},
    }


def _inline_references(node: Any, parts: Mapping[str, Any]) -> Any:
    """Replaces references in a schema by their definitions."""
    if isinstance(node, list):
        return [_inline_references(entry, parts) for entry in node]
    if not isinstance(node, dict):
        return node
    if REFERENCE in node:
        return _inline_references(parts[node[REFERENCE].rpartition("/")[2]], parts)
    return {name: _inline_references(entry, parts) for name, entry in node.items()}


def _make_schema(example: Any) -> dict[str, Any]:
    """Returns the schema of an error body; null in the example means an optional text."""
    if example is None:
        return {"type": ["string", "null"]}
    if isinstance(example, dict):
        properties = {name: _make_schema(value) for name, value in example.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "integer" if isinstance(example, int) else "string"}
