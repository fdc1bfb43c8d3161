"""Request bodies in the OpenAPI description, from the classes that check them.

The routes read their bodies themselves (`body.body_of`), so that FastAPI does not see what these
hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

REFERENCE = "$ref"


def describe_bodies(router: APIRouter) -> None:
    """Adds to each route of a router the schema of the body that `body_of` reads for it."""
    for route in router.routes:
        if not isinstance(route, APIRoute):
            continue
        for dependency in route.dependant.dependencies:
            kind = getattr(dependency.call, "kind", None)
            if kind is not None:
                route.openapi_extra = {"requestBody": request_body(kind)}


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Returns OpenAPI's description of a JSON body, parts of its schema written out in place."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})
    return {"required": True, "content": {"application/json": {"schema": _whole(schema, parts)}}}


def _whole(node: Any, parts: Mapping[str, Any]) -> Any:
    """Returns a schema in which each reference is what it refers to."""
    if isinstance(node, list):
        return [_whole(entry, parts) for entry in node]
    if not isinstance(node, dict):
        return node
    if REFERENCE in node:
        return _whole(parts[node[REFERENCE].rpartition("/")[2]], parts)
    return {name: _whole(entry, parts) for name, entry in node.items()}
