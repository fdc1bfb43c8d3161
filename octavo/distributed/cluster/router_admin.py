"""Adds servers to a router and removes them, over HTTP with the operator's key."""

from __future__ import annotations

from typing import Any

import httpx2

TIMEOUT_S = 10.0
"""Timeout of a request, in seconds."""


class RouterAdmin:
    """Client of a router's server list; raises httpx2.HTTPError if the router is unavailable or
    rejects a request.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = f"{url}/router/servers"
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def join(self, url: str) -> int:
        """Adds a server, or a removed server again; returns its number."""
        return int(self._request("POST", json={"url": url}).json()["number"])

    def leave(self, number: int) -> None:
        """Drains a server; the router removes it when it has no requests."""
        self._request("DELETE", f"/{number}")

    def is_gone(self, number: int) -> bool:
        """Returns whether a removed server has finished draining."""
        cards = self._request("GET").json()["data"]
        return all(card["number"] != number or card["standing"] == "gone" for card in cards)

    def _request(self, method: str, path: str = "", **body: Any) -> httpx2.Response:
        response = httpx2.request(
            method,
            self._url + path,
            headers=self._headers,
            timeout=TIMEOUT_S,
            verify=False,  # plain HTTP: loading certificates would take 0.1 s
            trust_env=False,
            **body,
        )
        return response.raise_for_status()
