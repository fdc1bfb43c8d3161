"""LLM and AsyncLLM: the offline and the asynchronous front of an engine.

LLM has the core in its own process and steps it while it waits; AsyncLLM reads the core's outputs
in a thread and serves any number of streams. Both own nothing but their front (input and output
processor) and a client of the core.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self

from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineInfo
from octavo.engine.core import CoreOutputs
from octavo.engine.front.input_processor import (
    FrontRequest,
    Origin,
    Prompt,
    default_sampling_params,
    prompt_list,
)
from octavo.engine.front.queue_limit import QueueLimit, Size
from octavo.engine.kv.pin import COMPUTE, check_pin, pin_of
from octavo.engine.stats import EngineStats
from octavo.errors import EngineDead, InvalidRequest, OctavoError, Unavailable
from octavo.outputs import Profile, RequestOutput
from octavo.ports import Profiler, Tokenizer
from octavo.progress import Bar, quiet, to_stderr
from octavo.sampling_params import BeamSearchParams, SamplingParams, params_for_each
from octavo.wiring import Front, Report, build_in_process, build_with_process

Messages = Sequence[dict[str, Any]]
"""One conversation: [{"role": "user", "content": "..."}, ...]"""


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
        self._stats = EngineStats()
        self._changed: set[str] = set()
        """Requests with something new that whoever waits for them has not seen: several streams may
        be read in turns.
        """

    @property
    def config(self) -> EngineConfig:
        """Every option, derived ones included."""
        return self._front.config

    @property
    def info(self) -> EngineInfo:
        """Vocabulary, context and what the KV cache holds."""
        return self._front.client.info

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """What the model's makers recommend; {} where they say nothing."""
        return self._front.generation_config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Final outputs, in the order of the prompts.

        `sampling_params` and `priority`: one for all, or one for each; no params: the model's own
        defaults. All prompts are checked before any is computed. A request that fails while it is
        computed has an output with `error` set; the others are not touched.
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
        """The sequences that a search finds for each prompt, best first, with their scores.
        `options` are those of `generate`.
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
        """Answers to one conversation or several, through the model's chat template."""
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
        """A conversation as a prompt for `generate` or `stream`, through the model's chat
        template."""
        return self._front.inputs.chat_prompt(
            messages, add_generation_prompt=add_generation_prompt, variables=chat_template_kwargs
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """One request's outputs as they grow, each with all of it so far; leaving the loop aborts
        it.
        """
        return self._run(self._requests([prompt], sampling_params), streaming=True)

    def get_tokenizer(self) -> Tokenizer:
        return self._front.need_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return default_sampling_params(self._front.generation_config)

    def get_metrics(self) -> EngineStats:
        """Gauges and counters after the last step."""
        return self._stats

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forgets what earlier prompts computed, with `reset_connector` in host memory and on disk
        too. False while requests run.
        """
        return self._front.client.reset_prefix_cache(reset_connector=reset_connector)

    def pin_prefix(self, prompt: Prompt, *, ttl_s: float | None = None) -> int:
        """Computes the beginning of prompts to come, and keeps it in `prefix_cache_dir` for so
        long; None: for good, 0: no longer.

        Returns how many of its tokens are kept: those in whole blocks.
        """
        check_pin(ttl_s, self._front.config.cache)
        (output,) = self.generate(prompt, COMPUTE, use_tqdm=False)
        return self._front.client.pin_prefix(pin_of(output, prompt, ttl_s))

    def start_profile(self) -> None:
        """Times each kind of op of what is generated from now on; BackendUnavailable where the
        backend cannot.
        """
        self._profiler().start_profile()

    def stop_profile(self) -> Profile:
        """Where the time went since start_profile, beside what this machine can do at most, which
        is measured now.
        """
        return self._profiler().stop_profile()

    def _profiler(self) -> Profiler:
        assert self._front.profiler is not None, "LLM's core runs in this process"
        return self._front.profiler

    def close(self) -> None:
        """Gives back threads and memory; the engine is of no use afterwards."""
        self._front.client.close()

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
        return [self._front.inputs.process(str(next(self._request_ids)), *one) for one in asked]

    def _run(self, requests: list[FrontRequest], *, streaming: bool) -> Iterator[RequestOutput]:
        """Outputs as they change (`streaming`) or as they finish; whatever ends it early aborts
        what still runs.
        """
        front = self._front
        for request in requests:
            front.outputs.add(request)
            front.client.add(request.samples)
        unfinished = {request.request_id for request in requests}
        try:
            while unfinished:
                changed = self._changed & unfinished
                if not changed:
                    self._step(at_once=streaming)
                for request_id in changed:
                    self._changed.discard(request_id)
                    if streaming or front.outputs.is_finished(request_id):
                        output = front.outputs.output(request_id)
                        if output.finished:
                            unfinished.discard(request_id)
                        yield output
        finally:
            for request_id in unfinished:
                front.client.abort(front.outputs.unfinished_ids(request_id))
                front.outputs.forget(request_id)
                self._changed.discard(request_id)

    def _step(self, *, at_once: bool) -> None:
        """One step of the core, for all that run. `at_once`: a token of each, for whoever waits for
        it in this thread.
        """
        step = self._front.client.receive(take_early=None if at_once else self._take)
        if step is None:
            raise EngineDead("the engine was closed")
        self._take(step)

    def _take(self, step: CoreOutputs) -> bool:
        self._stats = step.stats
        changes = self._front.outputs.process(step.outputs, time.monotonic())
        if changes.abort_ids:
            self._front.client.abort(changes.abort_ids)
        self._changed.update(changes.request_ids)
        return True


class RequestStream:
    """One request's outputs as they grow; each holds all of it so far, or with `deltas` what the
    one before did not: a slow reader skips and loses nothing. Read by one task.
    """

    def __init__(self, llm: AsyncLLM, request_id: str, *, deltas: bool) -> None:
        self.request_id = request_id
        self._llm = llm
        self._deltas = deltas
        self._changed = False
        self._reader: asyncio.Future[None] | None = None
        """While it waits for a change."""
        self._finished = False
        self._error: OctavoError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        if not self._changed:
            await self._wait()
        self._changed = False
        if self._error is not None:
            self._finished = True
            raise self._error
        output = self._llm._output(self.request_id, only_new=self._deltas)
        self._finished = output.finished
        return output

    async def final(self) -> RequestOutput:
        """The final output; those before it are not even made."""
        while not (self._error or self._llm._is_finished(self.request_id)):
            await self._wait()
        self._changed = True
        return await anext(self)

    async def _wait(self) -> None:
        """For the next change."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        except asyncio.CancelledError:
            self.abandon()
            raise

    def abandon(self) -> bool:
        """Aborts the request if it still runs, and says whether it did."""
        if self._finished:
            return False
        self._finished = True
        self._llm._drop(self.request_id)
        return True

    async def aclose(self) -> None:
        """`abandon`, as async generators have it."""
        self.abandon()

    def wake(self, error: OctavoError | None = None) -> None:
        """There is something new."""
        self._error = self._error or error
        self._changed = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncLLM:
    """An engine for many concurrent requests, from one asyncio event loop.

    `from_options` loads the model (call it in a thread where the loop must go on). The core is
    listened to from the first request on, or from `start`.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._streams: dict[str, RequestStream] = {}
        self._request_ids = itertools.count()
        self._stats = EngineStats()
        self._queue = QueueLimit(front.config.scheduler)
        self._dead: EngineDead | None = None
        self._closing = False
        self._reader: threading.Thread | None = None

    @staticmethod
    def from_options(
        *, in_process: bool = False, report: Report = quiet, **options: Any
    ) -> AsyncLLM:
        """The core in a process of its own, or with `in_process` in a thread of this one."""
        build = build_in_process if in_process else build_with_process
        return AsyncLLM(build(EngineConfig.from_options(**options), report))

    @property
    def config(self) -> EngineConfig:
        return self._front.config

    @property
    def info(self) -> EngineInfo:
        """Vocabulary, context and what the KV cache holds."""
        return self._front.client.info

    def start(self) -> None:
        """Listens to the core from now on, in this event loop, so that its death is known though
        nobody asks for anything.
        """
        if self._reader is None:
            self._reader = threading.Thread(
                target=self._read,
                args=(asyncio.get_running_loop(),),
                name="octavo-reader",
                daemon=True,
            )
            self._reader.start()

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        deltas: bool = False,
    ) -> RequestStream:
        """Starts a request; a user's fault is raised here, before anything runs, and Overloaded
        where too many wait already.

        With `deltas` each output holds what is new since the one before, else all so far.
        """
        self._check_alive()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        self._check_queue(Size(params.num_samples))
        request_id = request_id or f"request-{next(self._request_ids)}"
        request = self._front.inputs.process(request_id, prompt, params, Origin(priority, tenant))
        size = Size(len(request.samples), len(request.samples) * len(request.prompt_token_ids))
        self._check_queue(size)
        self.start()
        self._front.outputs.add(request)
        stream = self._streams[request_id] = RequestStream(self, request_id, deltas=deltas)
        self._front.client.add(request.samples)
        self._queue.sent(size)
        return stream

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """`submit` as an async generator; closing it or cancelling its task aborts the request."""
        stream = self.submit(prompt, sampling_params, request_id, priority=priority, tenant=tenant)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt for `generate`, through the model's chat template."""
        return self._front.inputs.chat_prompt(
            messages, add_generation_prompt=add_generation_prompt, variables=chat_template_kwargs
        )

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream gets a final output with finish_reason "abort"."""
        self._front.client.abort(self._front.outputs.unfinished_ids(request_id))

    def check_health(self) -> None:
        """EngineDead once the core has ended, Unavailable while one that hung is being replaced."""
        self._check_alive()
        if self._front.client.trouble:
            raise Unavailable(self._front.client.trouble)

    def get_tokenizer(self) -> Tokenizer:
        return self._front.need_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return default_sampling_params(self._front.generation_config)

    def stats(self) -> EngineStats:
        """Gauges and counters after the last step."""
        return self._stats

    @property
    def num_unfinished(self) -> int:
        """Samples (n of a request) waiting or running."""
        return self._front.outputs.num_unfinished

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        self.start()
        return await asyncio.to_thread(
            self._front.client.reset_prefix_cache, reset_connector=reset_connector
        )

    async def pin_prefix(self, prompt: Prompt, *, ttl_s: float | None = None) -> int:
        """As LLM.pin_prefix has it."""
        check_pin(ttl_s, self._front.config.cache)
        output = await self.submit(prompt, COMPUTE).final()
        return await asyncio.to_thread(self._front.client.pin_prefix, pin_of(output, prompt, ttl_s))

    def close(self) -> None:
        """Ends the core; streams that still run get EngineDead."""
        self._closing = True
        self._front.client.close()
        if self._reader is not None:
            self._reader.join()
        self._die(EngineDead("the engine was closed"))

    # -- from the core -----------------------------------------------------------------------------

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: hands each step's outputs to the event loop."""

        def hand_over(step: CoreOutputs) -> bool:
            loop.call_soon_threadsafe(self._take, step)
            return True

        while not self._closing:
            try:
                step = self._front.client.receive(take_early=hand_over)
                if step is not None:
                    hand_over(step)
            except Exception as error:
                dead = (
                    error
                    if isinstance(error, EngineDead)
                    else EngineDead(f"the engine has failed: {type(error).__name__}: {error}")
                )
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._die, dead)
                return

    def _take(self, step: CoreOutputs) -> None:
        now = time.monotonic()
        self._stats = step.stats
        self._queue.take(step.stats, now)
        changes = self._front.outputs.process(step.outputs, now)
        if changes.abort_ids:
            self._front.client.abort(changes.abort_ids)
        for request_id in changes.request_ids:
            self._streams[request_id].wake()

    def _die(self, error: EngineDead) -> None:
        self._dead = self._dead or error
        for stream in self._streams.values():
            stream.wake(error)
        self._streams.clear()

    # -- from the streams --------------------------------------------------------------------------

    def _output(self, request_id: str, *, only_new: bool) -> RequestOutput:
        output = self._front.outputs.output(request_id, only_new=only_new)
        if output.finished:
            del self._streams[request_id]
        return output

    def _is_finished(self, request_id: str) -> bool:
        return self._front.outputs.is_finished(request_id)

    def _drop(self, request_id: str) -> None:
        """Nobody reads this request any more."""
        if self._streams.pop(request_id, None) is not None:
            self._front.client.abort(self._front.outputs.unfinished_ids(request_id))
            self._front.outputs.forget(request_id)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _check_queue(self, more: Size) -> None:
        self._queue.check(more, num_unfinished=self.num_unfinished, now=time.monotonic())
