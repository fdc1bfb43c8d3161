"""What a cluster asks of its router, over HTTP with the operator's key: servers join and leave."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Protocol

TIMEOUT_S = 10.0
"""Seconds in which the router must answer."""


class RouterAdmin(Protocol):
    """The list of a router's servers."""

    def join(self, url: str) -> int:
        """Lets a server join, or come back; returns its number. Raises OSError where the router is
        away.
        """
        ...

    def leave(self, number: int) -> None:
        """Drains a server, and lets it go once it has no request."""
        ...

    def is_gone(self, number: int) -> bool:
        """Returns whether a server that was told to leave has left."""
        ...


class HttpRouterAdmin:
    """Implements `RouterAdmin`."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def join(self, url: str) -> int:
        return int(self._ask("POST", "", {"url": url})["number"])

    def leave(self, number: int) -> None:
        self._ask("DELETE", f"/{number}")

    def is_gone(self, number: int) -> bool:
        cards = self._ask("GET", "")["data"]
        return all(card["number"] != number or card["standing"] == "gone" for card in cards)

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        """Asks the router; OSError where it is away or refuses."""
        request = urllib.request.Request(
            f"{self._url}/router/servers{path}",
            method=method,
            headers=self._headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
        return found
