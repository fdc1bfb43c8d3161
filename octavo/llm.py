"""LLM: an engine in the caller's own process, for batches of prompts.

The core is stepped by the caller while it waits for its outputs. All that LLM shares with AsyncLLM
is its `Front`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineInfo
from octavo.engine.core import CoreOutputs
from octavo.engine.front.input_processor import FrontRequest, Messages, Origin, Prompt, prompt_list
from octavo.engine.stats import EngineStats
from octavo.errors import EngineDead, InvalidRequest
from octavo.outputs import Profile, RequestOutput
from octavo.ports import Profiler, Tokenizer
from octavo.progress import Bar, Report, to_stderr
from octavo.sampling_params import BeamSearchParams, SamplingParams, params_for_each
from octavo.wiring.engine import build_in_process


class LLM:
    """An engine in this process, for batches of prompts.

    `LLM(model="smollm2").generate("Hello")`. Options are the fields of `octavo.config`; an unknown
    one is refused by name.
    """

    def __init__(
        self, model: str | None = None, *, report: Report = to_stderr, **options: Any
    ) -> None:
        """`report` is told what is being done while the model loads."""
        given = options if model is None else {"model": model, **options}
        self._front = build_in_process(EngineConfig.from_options(**given), report)
        self._request_ids = itertools.count()
        self._changed: set[str] = set()
        """Ids of requests with something new that their reader has not seen; several streams may be
        read in turns.
        """

    @property
    def config(self) -> EngineConfig:
        """Every option, derived ones included."""
        return self._front.config

    @property
    def info(self) -> EngineInfo:
        """Vocabulary, context and what the KV cache holds."""
        return self._front.info

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Sampling values that the model's makers recommend; {} where they name none."""
        return self._front.generation_config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Computes the prompts together and returns their final outputs, in the prompts' order.

        `sampling_params` and `priority` are one for all, or one for each; without params the
        model's own defaults hold. All prompts are checked before any is computed. A request that
        fails while it is computed has an output with `error` set; the others are not touched.
        """
        requests = self._requests(prompt_list(prompts), sampling_params, priority)
        done: dict[str, RequestOutput] = {}
        with Bar("prompts", len(requests), enabled=use_tqdm) as bar:
            for output in self._run(requests, streaming=False):
                done[output.request_id] = output
                bar.advance()
        return [done[request.request_id] for request in requests]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **options: Any
    ) -> list[RequestOutput]:
        """Searches for the most likely sequences after each prompt; returns them best first, with
        their scores. `options` are those of `generate`.
        """
        return self.generate(prompts, params.sampling_params(), **options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Renders a conversation through the model's chat template, as a prompt for `generate` or
        `stream`.
        """
        return self._front.chat_prompt(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields one request's outputs as they grow, each with all of it so far; leaving the loop
        aborts the request.
        """
        return self._run(self._requests([prompt], sampling_params), streaming=True)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; InvalidRequest where the engine runs without one."""
        return self._front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the params of a request that names none: the model's own."""
        return self._front.default_params

    def get_metrics(self) -> EngineStats:
        """Returns gauges and counters after the last step."""
        return self._front.stats

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forgets the KV of earlier prompts, with `reset_connector` in host memory and on disk too;
        returns False, and does nothing, while requests run.
        """
        return self._front.reset_prefix_cache(reset_connector=reset_connector)

    def pin_prefix(self, prompt: Prompt, *, ttl_s: float | None = None) -> int:
        """Computes a prompt and keeps its whole blocks in `prefix_cache_dir` for `ttl_s` seconds
        (None: for good, 0: no longer); returns how many tokens these blocks hold.
        """
        params = self._front.pin_params(ttl_s)
        (computed,) = self.generate(prompt, params, use_tqdm=False)
        return self._front.pin(computed, prompt, ttl_s)

    def start_profile(self) -> None:
        """Times each kind of op from now on; BackendUnavailable where the backend cannot."""
        self._profiler().start_profile()

    def stop_profile(self) -> Profile:
        """Returns where the time went since start_profile, and measures what this machine can do
        at most.
        """
        return self._profiler().stop_profile()

    def _profiler(self) -> Profiler:
        assert self._front.profiler is not None, "LLM's core runs in this process"
        return self._front.profiler

    def close(self) -> None:
        """Gives back threads and memory; the engine is of no use afterwards."""
        self._front.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
    ) -> list[FrontRequest]:
        each = params_for_each(
            self.get_default_sampling_params() if params is None else params, len(prompts)
        )
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(prompts):
            raise InvalidRequest(
                f"priority: got {len(priorities)}, allowed is one, or one for each of the"
                f" {len(prompts)} prompts"
            )
        asked = zip(prompts, each, map(Origin, priorities), strict=True)
        return [self._front.prepare(str(next(self._request_ids)), *one) for one in asked]

    def _run(self, requests: list[FrontRequest], *, streaming: bool) -> Iterator[RequestOutput]:
        """Yields outputs as they change (`streaming`) or as they finish; leaving it early aborts
        what still runs.
        """
        front = self._front
        unfinished = {request.request_id for request in requests}
        try:
            for request in requests:
                front.submit(request)
            while unfinished:
                changed = self._changed & unfinished
                if not changed:
                    self._step(at_once=streaming)
                for request_id in changed:
                    self._changed.discard(request_id)
                    if streaming or front.is_finished(request_id):
                        output = front.output(request_id)
                        if output.finished:
                            unfinished.discard(request_id)
                        yield output
        finally:
            for request_id in unfinished:
                front.drop(request_id)
                self._changed.discard(request_id)

    def _step(self, *, at_once: bool) -> None:
        """Steps the core once, for all requests that run; with `at_once` the step ends with the
        first token of each.
        """
        step = self._front.client.receive(take_early=None if at_once else self._take)
        if step is None:
            raise EngineDead("the engine was closed")
        self._take(step)

    def _take(self, step: CoreOutputs) -> bool:
        self._changed.update(self._front.take(step))
        return True
