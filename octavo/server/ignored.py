"""Ignored request fields: collected per request, returned in a response header, each logged once.

With `--strict` the first one is rejected with a 400. Each parser of a part of a request adds the
fields that it ignores, by path.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from functools import reduce

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.errors import InvalidRequest
from octavo.text.grammar.schema import pointer_keys

HEADER = "X-Octavo-Ignored"
SCOPE_KEY = "octavo_ignored_fields"
"""Key of the ASGI scope for a request's IgnoredFields."""
UNSUPPORTED = "not supported by this server"

MAX_HEADER = 2048
"""Maximum length of the header in characters; proxies allow about 8 KiB for all headers
together.
"""
MAX_NAME = 80
"""Maximum length of a client's field name in a path."""
MAX_LOGGED = 1024
"""Maximum number of different paths that one server logs."""

PLAIN_NAME = re.compile(r"[A-Za-z0-9_$@*/-]+")
QUOTED_OR_INDEX = re.compile(r'("(?:[^"\\]|\\.)*")|\[\d+\]')

logger = logging.getLogger(__name__)


def join_path(path: str, name: str) -> str:
    """Returns the path of a member: a.b, or a["b c"] if the name is not a plain word."""
    if len(name) > MAX_NAME:
        name = name[: MAX_NAME - 3] + "..."
    elif PLAIN_NAME.fullmatch(name):
        return f"{path}.{name}" if path else name
    return f"{path}[{json.dumps(name)}]"


def quote_label(name: str) -> str:
    """Returns a client's name for a list entry, quoted if necessary, for a path."""
    is_plain = PLAIN_NAME.fullmatch(name) is not None and len(name) <= MAX_NAME
    return name if is_plain else json.dumps(name[:MAX_NAME])


class IgnoredFields:
    """Ignored fields of one request."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._paths: dict[str, None] = {}

    def add(
        self,
        path: str,
        reason: str = UNSUPPORTED,
        *,
        shown_as: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Adds a field by path, such as `messages[0].content[1].x`; the reported path omits
        indices. Raises InvalidRequest in strict mode.
        """
        if self.is_strict:
            raise InvalidRequest(f"{path}: {reason}", hint=hint, param=path)
        shown = QUOTED_OR_INDEX.sub(lambda found: found[1] or "[]", shown_as or path)
        self._paths.setdefault(shown)

    def add_keywords(
        self, pointers: Iterable[str], schema: str, shown_as: str | None = None
    ) -> None:
        """Adds keywords of a JSON schema that grammars do not enforce, by their JSON pointers.

        `schema` is the path of the schema, `shown_as` the reported one.
        """
        for pointer in pointers:
            keys = pointer_keys(pointer)
            self.add(
                reduce(join_path, keys, schema),
                "not enforced by the grammar",
                shown_as=reduce(join_path, keys, shown_as or schema),
            )

    @property
    def paths(self) -> list[str]:
        """Distinct paths, in order."""
        return list(self._paths)

    def drops_entries(self, name: str) -> bool:
        """Returns whether entries of unknown types in the list `name` were ignored."""
        return any(path.startswith(f"{name}[type=") for path in self._paths)

    @property
    def header(self) -> str:
        """Value of the response header; if too long, it ends with a count."""
        paths, length = self.paths, 0
        for index, path in enumerate(paths):
            length += len(path) + len(", ")
            if length > MAX_HEADER:
                return ", ".join([*paths[:index], f"and {len(paths) - index} more"])
        return ", ".join(paths)


class IgnoredHeader:
    """ASGI middleware: adds the header to responses, and logs each field once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged: set[tuple[str, str]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_header(message: Message) -> None:
            ignored: IgnoredFields | None = scope.get(SCOPE_KEY)
            if message["type"] == "http.response.start" and ignored is not None and ignored.paths:
                MutableHeaders(scope=message)[HEADER] = ignored.header
                self._log(ignored, getattr(scope.get("route"), "path", ""))
            await send(message)

        await self._app(scope, receive, send_with_header)

    def _log(self, ignored: IgnoredFields, route: str) -> None:
        for path in ignored.paths:
            if (route, path) not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add((route, path))
                logger.warning("%s: the request field %s is ignored", route, path)
