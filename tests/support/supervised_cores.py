"""Supervised cores in processes of their own over the pseudo-model, and what they yield."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.engine.clients.process import ProcessClient
from octavo.engine.clients.supervised import SupervisedClient
from octavo.engine.protocol.outputs import CoreOutputs, EngineOutput
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.stats import EngineStats
from tests.support.engine_fakes import expected_tokens, make_request

STALL_S = 1.0
PROMPTS = {"a": [1, 2, 3], "b": list(range(40)), "c": [7] * 20}


class NotedClient(SupervisedClient):
    """A ready SupervisedClient that notes what is reported and which cores were started.

    `build_of` names the function of core_builders that builds the core of each number.
    """

    def __init__(
        self,
        kind: str,
        *,
        stall_timeout_s: float = STALL_S,
        build_of: Callable[[int], str] = lambda num_before: "build",
    ) -> None:
        self.said: list[str] = []
        self.starts: list[int] = []

        def start(num_before: int, changes: Mapping[str, Any]) -> ProcessClient:
            self.starts.append(num_before)
            build = f"tests.support.core_builders:{build_of(num_before)}"
            return ProcessClient(build, {"kind": kind, **changes})

        super().__init__(start, stall_timeout_s=stall_timeout_s, report=self.said.append)
        self.wait_until_ready(lambda text: None)
        self.stats = EngineStats()
        """Statistics that came with the last outputs."""

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        step = super().receive(timeout_s)
        if step is not None:
            self.stats = step.stats
        return step


def requests(prompts: dict[str, list[int]] = PROMPTS, **options: object) -> list[EngineRequest]:
    return [
        make_request(name, prompt, max_tokens=40, **options) for name, prompt in prompts.items()
    ]


def collect(
    client: SupervisedClient, num_finals: int, tokens: dict[str, list[int]] | None = None
) -> tuple[dict[str, list[int]], dict[str, EngineOutput]]:
    """Receives until that many requests have ended; returns tokens and final outputs by request."""
    tokens = {} if tokens is None else tokens
    ends: dict[str, EngineOutput] = {}
    while len(ends) < num_finals:
        step = client.receive(timeout_s=20)
        assert step is not None, (tokens, ends)
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in ends, "one final output each"
                ends[output.request_id] = output
    return tokens, ends


def collect_good(
    client: SupervisedClient,
    prompts: dict[str, list[int]],
    bad: list[str],
    tokens: dict[str, list[int]] | None = None,
) -> dict[str, EngineOutput]:
    """Checks that the bad requests fail and that all others yield what they should."""
    tokens, ends = collect(client, len(prompts) + len(bad), tokens)
    for name, prompt in prompts.items():
        assert ends[name].finish_reason == "length", (name, ends[name])
        assert tokens[name] == expected_tokens(prompt, 40), name
    for name in bad:
        assert ends[name].finish_reason == "error", name
    return ends


def take_steps(client: SupervisedClient, count: int) -> dict[str, list[int]]:
    """Receives some steps in which no request ends; returns the tokens that they yielded."""
    tokens: dict[str, list[int]] = {}
    for _ in range(count):
        step = client.receive(timeout_s=10)
        assert step is not None
        for output in step.outputs:
            assert output.finish_reason is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens
