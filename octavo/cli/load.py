"""Sends requests to a server, each at its moment, and waits for all answers. Decides neither what
is asked nor what is made of it.
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

from octavo.cli.serve_figures import Outcome
from octavo.cli.stream_client import StreamClient
from octavo.cli.traffic import Ask, prompt_of
from octavo.errors import ConfigError, WorkerFailed
from octavo.progress import Bar

WARM_UP = Ask("warm-up", 0.0, 8, 2)
MAX_OPEN_FILES = 1 << 16


@dataclass(frozen=True, slots=True)
class Load:
    """`model` None: the first that the server has."""

    url: str
    api_key: str | None
    model: str | None
    asks: Sequence[Ask]
    seed: int = 0
    max_concurrency: int | None = None


def run_load(load: Load) -> tuple[str, list[Outcome], float]:
    """The model's name, an outcome for each request in their order, and seconds from the first one
    sent to the last one answered.
    """
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load))


async def _run(load: Load) -> tuple[str, list[Outcome], float]:
    client = StreamClient(load.url, load.api_key)
    card = _card(await client.models(), load)
    _check_fits(load.asks, card.get("max_model_len"))
    model = str(card["id"])
    try:
        await client.complete(_body(model, WARM_UP, load.seed))
    except WorkerFailed as error:
        raise ConfigError(f"{load.url}: the first request fails: {error.message}") from error
    with Bar("requests", len(load.asks)) as bar:
        sender = Sender(client, model, load, bar)
        outcomes = await asyncio.gather(*map(sender.send, load.asks))
    return model, outcomes, time.perf_counter() - sender.began


class Sender:
    """Began when made."""

    def __init__(self, client: StreamClient, model: str, load: Load, bar: Bar) -> None:
        self.began = time.perf_counter()
        self._client = client
        self._model = model
        self._seed = load.seed
        self._places: AbstractAsyncContextManager[Any] = (
            nullcontext()
            if load.max_concurrency is None
            else asyncio.Semaphore(load.max_concurrency)
        )
        self._bar = bar

    async def send(self, ask: Ask) -> Outcome:
        """At its moment, or when there is a place."""
        await asyncio.sleep(self.began + ask.at_s - time.perf_counter())
        async with self._places:
            body = _body(self._model, ask, self._seed)
            late_s = time.perf_counter() - self.began - ask.at_s
            try:
                return Outcome(ask, late_s, await self._client.complete(body))
            except WorkerFailed as error:
                return Outcome(ask, late_s, error=error.message)
            finally:
                self._bar.advance()


def _body(model: str, ask: Ask, seed: int) -> bytes:
    body = {
        "model": model,
        "prompt": prompt_of(ask, seed),
        "max_tokens": ask.output_len,
        "temperature": 0,
        "ignore_eos": True,
    }
    return msgspec.json.encode(
        body | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    )


def _card(cards: Sequence[dict[str, Any]], load: Load) -> dict[str, Any]:
    names = [str(card["id"]) for card in cards]
    if not names or (load.model is not None and load.model not in names):
        raise ConfigError(
            f"model: got {load.model!r}, {load.url} serves {', '.join(names) or 'none'}"
        )
    return cards[0 if load.model is None else names.index(load.model)]


def _check_fits(asks: Sequence[Ask], context: int | None) -> None:
    """The first that does not fit, before anything is sent; a server that does not say its context
    refuses it itself.
    """
    for ask in asks:
        if context is not None and ask.input_len + ask.output_len > context:
            wanted = f"{ask.input_len} + {ask.output_len} tokens"
            raise ConfigError(
                f"{ask.name}: {wanted} exceed the server's context of {context}",
                hint="give a smaller --scale, or shorter lengths",
            )


def _allow_many_files() -> None:
    """Every request under way has a connection, and the own server as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
