"""Sends a benchmark's requests to a server at their scheduled times and collects the responses.

`traffic.py` creates the requests; `serve_figures.py` evaluates the results.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from octavo.api.errors import ConfigError, WorkerFailed
from octavo.tools.bench.serve_figures import Outcome
from octavo.tools.bench.stream_client import StreamClient
from octavo.tools.bench.traffic import TrafficRequest, make_prompt
from octavo.utils.progress import Bar

WARM_UP = TrafficRequest("warm-up", 0.0, 8, 2)
"""Request sent first as a warm-up; not counted."""
MAX_OPEN_FILES = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadTest:
    """A server and the requests to send to it."""

    url: str
    api_key: str | None
    model: str | None
    """Name of the model; None: the first one served."""
    requests: Sequence[TrafficRequest]
    seed: int = 0
    max_concurrency: int | None = None
    """Maximum number of requests in progress; beyond it, requests are sent later than scheduled."""


def run_load(test: LoadTest) -> tuple[str, list[Outcome], float]:
    """Returns the model's name, the outcome of each request in order, and the elapsed seconds from
    the first request sent to the last response.
    """
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(test))


async def _run(test: LoadTest) -> tuple[str, list[Outcome], float]:
    client = StreamClient(test.url, test.api_key)
    card = _card(await client.models(), test)
    _check_fits(test.requests, card.get("max_model_len"))
    model = str(card["id"])
    try:
        await client.complete(_body(model, WARM_UP, test.seed))
    except WorkerFailed as error:
        raise ConfigError(f"{test.url}: the first request failed: {error.message}") from error
    with Bar("requests", len(test.requests)) as bar:
        sender = Sender(client, model, test, bar)
        outcomes = await asyncio.gather(*map(sender.send, test.requests))
    return model, outcomes, time.perf_counter() - sender.began


class Sender:
    """Sends requests at their scheduled times, relative to the sender's creation."""

    def __init__(self, client: StreamClient, model: str, test: LoadTest, bar: Bar) -> None:
        self.began = time.perf_counter()
        self._client = client
        self._model = model
        self._seed = test.seed
        self._places: AbstractAsyncContextManager[Any] = nullcontext()
        if test.max_concurrency is not None:
            self._places = asyncio.Semaphore(test.max_concurrency)
        self._bar = bar

    async def send(self, request: TrafficRequest) -> Outcome:
        """Sends a request at its scheduled time, or later if too many are in progress."""
        await asyncio.sleep(self.began + request.at_s - time.perf_counter())
        async with self._places:
            body = _body(self._model, request, self._seed)
            late_s = time.perf_counter() - self.began - request.at_s
            try:
                return Outcome(request, late_s, await self._client.complete(body))
            except WorkerFailed as error:
                return Outcome(request, late_s, error=error.message)
            finally:
                self._bar.advance()


def _body(model: str, request: TrafficRequest, seed: int) -> bytes:
    body = {
        "model": model,
        "prompt": make_prompt(request, seed),
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
    }
    return msgspec.json.encode(
        body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    )


def _card(cards: Sequence[dict[str, Any]], test: LoadTest) -> dict[str, Any]:
    names = [str(card["id"]) for card in cards]
    if not names or (test.model is not None and test.model not in names):
        raise ConfigError(
            f"model: got {test.model!r}, {test.url} serves {', '.join(names) or 'none'}",
            hint="pass one of these names as --model",
        )
    return cards[0 if test.model is None else names.index(test.model)]


def _check_fits(requests: Sequence[TrafficRequest], context: int | None) -> None:
    """Raises ConfigError for the first request that does not fit the context.

    If the context is unknown (None), the server rejects the request itself.
    """
    for request in requests:
        if context is not None and request.input_len + request.output_len > context:
            requested = f"{request.input_len} + {request.output_len} tokens"
            raise ConfigError(
                f"{request.name}: {requested} exceed the server's context of {context}",
                hint="use a smaller --scale, or shorter lengths",
            )


def _allow_many_files() -> None:
    """Raises the limit of open files: each request in progress has a connection, and a server
    started by this process inherits the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
