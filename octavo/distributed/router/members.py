"""Servers of a router: which ones may receive requests, and their models, capabilities and load.

A server that cannot be reached is skipped at once (its circuit breaker is open), and only the
health check contacts it, with increasing delay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.distributed.router.settings import RouterSettings
from octavo.distributed.router.upstream import UpstreamClient, UpstreamLost
from octavo.distributed.transfer.messages import UNREADABLE
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.routing.target import Target

NOT_CHECKED = "no check has succeeded yet"
STABLE_S = 60.0
"""Time after which a recovered server is checked at the normal interval again."""


Standing = Literal["in", "draining", "gone"]
"""State of a server: active, draining, or removed."""


class KvEventsCard(msgspec.Struct):
    """Endpoints at which a server publishes its KV events, from its capabilities."""

    endpoints: list[str] = []
    replay_endpoints: list[str] = []
    topic: str = ""
    is_locked: bool = False


class CapabilityCard(msgspec.Struct):
    """Fields of /v1/capabilities that routing uses."""

    block_size: int | None = None
    kv_events: KvEventsCard | None = None
    kv_pool: str = ""


class ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[msgspec.Raw] = []

    def cards(self) -> dict[str, tuple[ModelCard, msgspec.Raw]]:
        """Returns each model's card by name, parsed and raw."""
        cards = {}
        for raw in self.data:
            card = msgspec.json.decode(raw, type=ModelCard)
            cards[card.id] = card, raw
        return cards


@dataclass(slots=True)
class Member:
    """A server behind the router."""

    client: UpstreamClient
    target: Target
    trouble: str = NOT_CHECKED
    """Reason why it receives no requests; "" while it is healthy."""
    standing: Standing = "in"
    models: frozenset[str] = frozenset()
    """Names of its models; empty if it does not list them."""
    adapters: frozenset[str] = frozenset()
    """Names in `models` that are adapters."""
    cards: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """Raw card of each of `models`."""
    capabilities: CapabilityCard = field(default_factory=CapabilityCard)
    num_running: int = 0
    """Number of its running requests."""
    num_failures: int = 0
    """Failed checks and requests since it was last healthy for STABLE_S."""
    well_since_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when its circuit breaker opens, so that it is checked at once."""

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def is_well(self) -> bool:
        return not self.trouble

    @property
    def accepts_requests(self) -> bool:
        """Whether it may receive requests now."""
        return self.is_well and self.standing == "in"

    def serves(self, model: str | None) -> bool:
        """Whether it serves a model, or may do so because it does not list its models."""
        return model is None or not self.models or model in self.models

    def record_failure(self, reason: str) -> None:
        """Opens the circuit breaker: the server gets no requests until a check succeeds."""
        if self.is_well and time.monotonic() - self.well_since_s > STABLE_S:
            self.num_failures = 0
        self.num_failures += 1
        self.trouble = reason or "no response"
        self.changed.set()

    def record_success(self) -> bool:
        """Closes the circuit breaker; returns whether it was open."""
        was_open = not self.is_well
        if was_open:
            self.well_since_s = time.monotonic()
        elif time.monotonic() - self.well_since_s > STABLE_S:
            self.num_failures = 0
        self.trouble = ""
        return was_open


class Members:
    """All servers of a router, in the order in which they were added; a removed server keeps its
    number.
    """

    def __init__(self, urls: Sequence[str], settings: RouterSettings) -> None:
        self._settings = settings
        self._members = [self._make(url) for url in urls]
        self.is_stopping = False

    def _make(self, url: str) -> Member:
        settings = self._settings
        client = UpstreamClient(
            url, connect_timeout_s=settings.connect_timeout_s, api_key=settings.server_api_key
        )
        return Member(client, Target(client.url, CachedHashes(settings.max_known_blocks)))

    def add(self, url: str) -> Member:
        """Adds a server at the end; raises ConfigError if the URL is invalid."""
        member = self._make(url)
        self._members.append(member)
        return member

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __getitem__(self, index: int) -> Member:
        return self._members[index]

    @property
    def block_size(self) -> int | None:
        """Block size of the servers in tokens; None before one has reported it."""
        sizes = (member.capabilities.block_size for member in self._members)
        return next((size for size in sizes if size), None)

    @property
    def has_events(self) -> bool:
        """Whether any server publishes KV events, so that prompts should be tokenized."""
        return any(member.capabilities.kv_events is not None for member in self._members)

    def is_adapter(self, model: str | None) -> bool:
        return any(model in member.adapters for member in self._members)

    def get_candidates(self, model: str | None, without: set[int]) -> list[int]:
        """Returns the servers to which a request for a model may be sent, except those in
        `without`.

        If no server lists the model, all are candidates: the chosen one returns the error.
        """
        well = [
            index
            for index, member in enumerate(self._members)
            if member.accepts_requests and index not in without
        ]
        if any(model in member.models for member in self._members if member.standing != "gone"):
            return [index for index in well if self._members[index].serves(model)]
        return well

    def merge_model_lists(self) -> list[msgspec.Raw] | None:
        """Returns the cards of all models that are currently served; None if all servers have the
        same models.
        """
        listing = [member for member in self._members if member.accepts_requests and member.cards]
        if len({member.models for member in listing}) < 2:
            return None
        cards: dict[str, msgspec.Raw] = {}
        for member in listing:
            for name, card in member.cards.items():
                cards.setdefault(name, card)
        return list(cards.values())

    def describe_trouble(self, model: str | None) -> str:
        """Returns the reasons why no server is available, for an error message."""
        here = [member for member in self._members if member.standing == "in"]
        asked = [member for member in here if member.serves(model)] or here
        return "; ".join(
            f"server {self._members.index(member)}: {member.trouble}"
            for member in asked
            if member.trouble
        )

    def close(self) -> None:
        for member in self._members:
            member.client.close()


class HealthCheck:
    """Periodic health check of one server, which also reads its models and capabilities."""

    def __init__(self, member: Member, settings: RouterSettings) -> None:
        self._member = member
        self._settings = settings

    async def run(self) -> None:
        """Checks until it is cancelled."""
        while True:
            await self.check()
            await self._pause()

    async def check(self) -> None:
        """Checks once; a failure opens the server's breaker, a success closes it."""
        member = self._member
        try:
            async with asyncio.timeout(self._settings.health_timeout_s):
                status, body = await member.client.fetch("GET", "/health")
                if status != 200:
                    raise UpstreamLost(_reason(status, body))
                listed = await self._read("/v1/models", ModelList())
                capabilities = member.capabilities
                if not member.is_well:
                    capabilities = await self._read("/v1/capabilities", CapabilityCard())
        except (UpstreamLost, TimeoutError) as error:
            reason = str(error) or f"no response within {self._settings.health_timeout_s:g} s"
            if not member.is_well:
                # After two failures in a row, requests without a response move to another server.
                member.client.abort_waiting(reason)
            member.record_failure(reason)
            return
        try:
            cards = listed.cards()
        except UNREADABLE:
            cards = {}
        member.models = frozenset(cards)
        member.adapters = frozenset(n for n, (card, _) in cards.items() if card.parent is not None)
        member.cards = {name: raw for name, (_, raw) in cards.items()}
        member.capabilities = capabilities
        member.target.pool = capabilities.kv_pool
        member.record_success()

    async def _pause(self) -> None:
        """Waits until the next check: not at all after a first failure, then longer after each
        further failure.
        """
        member, interval = self._member, self._settings.health_interval_s
        member.changed.clear()
        if member.is_well:
            try:
                await asyncio.wait_for(member.changed.wait(), interval)
            except TimeoutError:
                return
        if member.num_failures > 1:
            doubled = interval * 2 ** min(member.num_failures - 2, 16)
            await asyncio.sleep(min(doubled, self._settings.max_health_backoff_s))

    async def _read(self, path: str, default: Any) -> Any:
        """Returns a parsed response of a server; the default if it has none, for example because it
        is not Octavo or requires a key.
        """
        status, body = await self._member.client.fetch("GET", path)
        if status != 200:
            return default
        try:
            return msgspec.json.decode(body, type=type(default))
        except UNREADABLE:
            return default


def _reason(status: int, body: bytes) -> str:
    """Returns the error message of a response, on one line."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        message = "no reason given"
    return f"HTTP {status}: {message[:200]}"
