"""Many streams of a live server at once, read event by event, and what became of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.live_server import LiveServer


@dataclass
class StreamOutcome:
    """One stream: its tokens so far, and how it ended."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


async def follow(client: httpx.AsyncClient, body: dict[str, Any], outcome: StreamOutcome) -> None:
    """Reads a completion's stream to its end."""
    body = body | {"stream": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(outcome, json.loads(line.removeprefix("data: ")))


def take(outcome: StreamOutcome, event: dict[str, Any]) -> None:
    if "error" in event:
        outcome.error = event["error"]["message"]
        return
    outcome.timings = event.get("timings") or outcome.timings
    for choice in event["choices"]:
        outcome.token_ids += choice["token_ids"] or []
        outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason


Disturb = Callable[[Sequence[StreamOutcome]], Awaitable[None]]


async def nothing(outcomes: Sequence[StreamOutcome]) -> None:
    """Leaves the streams alone."""


def run_streams(
    server: LiveServer, bodies: Sequence[dict[str, Any]], disturb: Disturb = nothing
) -> list[StreamOutcome]:
    """Follows a stream for each body, beside what disturbs them; returns their outcomes."""
    outcomes = [StreamOutcome() for _ in bodies]

    async def run() -> None:
        async with server.async_http() as client:
            streams = (
                follow(client, body, outcome)
                for body, outcome in zip(bodies, outcomes, strict=True)
            )
            await asyncio.wait_for(asyncio.gather(disturb(outcomes), *streams), 120)

    asyncio.run(run())
    return outcomes


async def all_have(outcomes: Sequence[StreamOutcome], num_tokens: int) -> None:
    """Waits until every stream has as many tokens, or has ended."""
    while not all(one.has_ended or len(one.token_ids) >= num_tokens for one in outcomes):
        await asyncio.sleep(0.002)
