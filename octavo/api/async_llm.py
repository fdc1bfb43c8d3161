"""AsyncLLM: an engine for many concurrent requests on one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from octavo.api.errors import EngineDead, Unavailable, WorkerFailed
from octavo.api.lora_request import LoRARequest
from octavo.api.outputs import RequestOutput
from octavo.api.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from octavo.api.pooling_params import PoolingParams, PoolingTask, RequestParams
from octavo.api.sampling_params import SamplingParams
from octavo.api.transcription import Transcription
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineInfo, as_view
from octavo.engine.live.feed import EngineFeed, FeedReader
from octavo.engine.protocol.block_events import BlocksCleared
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import PrefixRef, ResetPrefixCache, ViewEngine
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import AdapterRef
from octavo.frontend.admission_limits import AdmissionLimits
from octavo.frontend.arguments import Messages, PoolingPrompt, Prompt, get_text
from octavo.frontend.async_jobs import AsyncJobs, Compute
from octavo.frontend.changes import Fork, RequestUpdate
from octavo.frontend.frontend import Frontend
from octavo.frontend.input_processor import DEFAULT_CONTEXT, ParentRequest, RequestContext
from octavo.frontend.live_requests import LiveRequest
from octavo.frontend.pins import COMPUTE, make_prefix
from octavo.frontend.pooling import PoolingJobs, PoolingPrompts, Texts
from octavo.frontend.prompt_inputs import Truncation
from octavo.frontend.remote_prefill import build_remote_prefill
from octavo.frontend.sessions import POLL_S, Sessions
from octavo.frontend.streams import RequestStream, RequestStreams, StreamEvents
from octavo.frontend.transcription import SpeechOptions
from octavo.text.ports import DEFAULT_RENDERING, Rendering, Tokenizer
from octavo.text.unicode import is_long
from octavo.utils.progress import Report, quiet
from octavo.wiring.control.engine_control import EngineControl
from octavo.wiring.engine import WhenStarted, build_in_process, build_with_process

Admission = Callable[[ParentRequest], None]
"""Called with a request just before it is submitted; an exception rejects the request."""


class AsyncLLM:
    """An engine for many concurrent requests on one asyncio event loop.

    `from_options` loads the model; it blocks, so call it in a thread if an event loop is running.
    The engine's outputs are received from the first request on, or from `start`.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._request_ids = itertools.count()
        self.limits = AdmissionLimits(frontend.config)
        self._jobs = AsyncJobs(frontend, self._next_id, self.prepare_request, self.submit_prepared)
        self._remote_prefill = build_remote_prefill(
            frontend.config,
            frontend.info,
            compute=self._compute_for_peer,
            compute_here=frontend.compute_here,
        )
        self.control = EngineControl(frontend)
        """Pause, sleep and weight updates."""
        self._feed = EngineFeed(frontend.client.watch, frontend.outputs.name_of)
        self._streams = RequestStreams(
            frontend, StreamEvents(self._handle_step, self._remote_prefill.ended, self._feed.fail)
        )

    @staticmethod
    def from_options(
        *,
        in_process: bool = False,
        report: Report = quiet,
        when_started: WhenStarted = lambda end: None,
        **options: Any,
    ) -> AsyncLLM:
        """Loads a model. The engine core runs in its own process, or in a thread with `in_process`.

        `when_started` receives a function that stops the process while the model loads.
        """
        config = EngineConfig.from_options(**options)
        if in_process:
            return AsyncLLM(build_in_process(config, report))
        return AsyncLLM(build_with_process(config, report, when_started))

    @property
    def config(self) -> EngineConfig:
        """All options, including derived ones."""
        return self._frontend.config

    @property
    def info(self) -> EngineInfo:
        return self._frontend.info

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running samples; a request has n."""
        return self._frontend.num_unfinished

    @property
    def prefill_peers(self) -> list[str]:
        """Addresses of the prefill engines currently known."""
        return self._remote_prefill.peers

    def start(self) -> None:
        """Starts receiving the engine's outputs in this event loop, so that a crash is noticed even
        without requests. Raises InvalidRequest if another open event loop receives them already.
        """
        if self._streams.start():
            self._remote_prefill.start()

    def submit(
        self,
        prompt: Prompt,
        sampling_params: RequestParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        owner: str = "",
        adapter: AdapterRef | None = None,
        deltas: bool = False,
        admit: Admission | None = None,
    ) -> RequestStream:
        """Submits a request and returns the stream of its outputs.

        Invalid requests are rejected here, before anything runs; raises Overloaded if the queue is
        full or the deadline cannot be met. An exception of `admit` rejects the request too. With
        `deltas`, each output has only its new part. Tokenizing a long text or compiling a new
        grammar would block the event loop: call `tokenize` and `check_grammar` first.
        """
        self._streams.check_alive()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        self.limits.check_room(params.num_samples, num_unfinished=self.num_unfinished)
        request_id = request_id or self._next_id()
        origin = RequestContext(priority, tenant, owner)
        request = self._frontend.prepare_request(
            request_id, prompt, params, origin, adapter=adapter
        )
        return self.submit_prepared(request, deltas=deltas, admit=admit)

    async def check_grammar(self, params: RequestParams) -> None:
        """Compiles the grammar of a request with structured output before `submit`, in a thread
        unless it is cached. Raises InvalidRequest if the grammar is not supported.
        """
        if not isinstance(params, SamplingParams) or self._frontend.inputs.has_grammar(params):
            return
        self._streams.check_alive()
        self.limits.check_room(params.num_samples, num_unfinished=self.num_unfinished)
        await asyncio.to_thread(self._frontend.inputs.check_grammar, params)

    def adapter(self, request: LoRARequest) -> AdapterRef:
        """Reads and checks the adapter files of a request, for `submit`. Blocking, thread-safe;
        raises InvalidRequest if the files are invalid.
        """
        return self._frontend.adapter(request)

    async def prepare_request(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: RequestParams,
        origin: RequestContext = DEFAULT_CONTEXT,
    ) -> ParentRequest:
        """Checks and tokenizes a request for `submit_prepared`; long texts are tokenized in a
        thread.
        """
        self._streams.check_alive()
        if is_long(get_text(prompt)):
            return await asyncio.to_thread(
                self._frontend.prepare_request, request_id, prompt, params, origin
            )
        await asyncio.sleep(0)  # which lets others go on between the texts of a long list
        return self._frontend.prepare_request(request_id, prompt, params, origin)

    async def embed(
        self, prompts: Texts, params: PoolingParams | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embeddings of texts, in order."""
        return await self._jobs.pool(self.pooling_jobs.embedding(prompts, params))

    async def encode(
        self, prompts: Texts, params: PoolingParams | None = None
    ) -> list[PoolingRequestOutput]:
        """Returns what the model pools of texts, in order: an embedding, an embedding of each
        token (late interaction), or probabilities.
        """
        return await self._jobs.pool(self.pooling_jobs.pooling(prompts, params))

    async def classify(
        self, prompts: PoolingPrompts, params: PoolingParams | None = None
    ) -> list[ClassificationRequestOutput]:
        """Classifies texts or pairs of texts (TextPair) and returns the results in order."""
        return await self._jobs.pool(self.pooling_jobs.classification(prompts, params))

    async def score(
        self, data_1: Texts, data_2: Texts, params: PoolingParams | None = None
    ) -> list[ScoringRequestOutput]:
        """Scores each text of `data_2` against the text of `data_1` (or the one with the same
        index).
        """
        return await self._jobs.pool(self.pooling_jobs.scoring(data_1, data_2, params))

    @property
    def pooling_jobs(self) -> PoolingJobs:
        return self._frontend.pooling_jobs

    @property
    def pools(self) -> PoolingTask | None:
        """Pooling task of the model; None for a generative model."""
        return self._frontend.task

    @property
    def media(self) -> frozenset[str]:
        """Media types that the model accepts besides text: "image", "video" and "audio" in prompts;
        "speech" if it transcribes.
        """
        return self._frontend.media

    async def transcribe(
        self,
        data: bytes,
        options: SpeechOptions,
        *,
        origin: RequestContext = DEFAULT_CONTEXT,
        compute: Compute | None = None,
    ) -> Transcription:
        """Transcribes an audio file; cancellation aborts the requests in progress. `compute`
        replaces the function that runs each request, for example to count them.
        """
        self._streams.check_alive()
        return await self._jobs.transcribe(data, options, origin, compute)

    def submit_prepared(
        self, request: ParentRequest, *, deltas: bool, admit: Admission | None = None
    ) -> RequestStream:
        """Submits a prepared request; raises Overloaded if the queue is full."""
        self.limits.check(request, num_unfinished=self.num_unfinished)
        self.start()
        if admit is not None:
            admit(request)
        self._remote_prefill.offer_to_peers(request)
        self._frontend.submit(request)
        self.limits.sent(request)
        return self._streams.open(request.request_id, deltas=deltas)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Yields a request's cumulative outputs; closing the generator or cancelling its task
        aborts the request.
        """
        prompt = await self.tokenize(prompt)
        await self.check_grammar(sampling_params or self.get_default_sampling_params())
        adapter = None
        if lora_request is not None:
            adapter = await asyncio.to_thread(self.adapter, lora_request)
        stream = self.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            tenant=tenant,
            adapter=adapter,
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> Prompt:
        """Tokenizes a prompt for `submit`; long texts in a thread. Raises ContextTooLong if the
        prompt does not fit and is not truncated.
        """
        if add_special_tokens and truncation is None and not is_long(get_text(prompt)):
            return prompt
        return await asyncio.to_thread(
            self._frontend.tokenize,
            prompt,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
        )

    def chat_prompt(
        self,
        messages: Messages,
        rendering: Rendering = DEFAULT_RENDERING,
        truncation: Truncation | None = None,
    ) -> dict[str, Any]:
        """Renders a conversation with the model's chat template, as a prompt for `generate`."""
        return self._frontend.chat_prompt(messages, rendering, truncation)

    async def infill_prompt(self, prefix: str, suffix: str) -> dict[str, Any]:
        """Returns a fill-in-the-middle prompt for `submit`. Raises InvalidRequest if the model's
        vocabulary has no FIM tokens.
        """
        if not is_long(prefix) and not is_long(suffix):
            return self._frontend.inputs.prompts.infill_prompt(prefix, suffix)
        return await asyncio.to_thread(self._frontend.inputs.prompts.infill_prompt, prefix, suffix)

    def render_chat(self, messages: Messages, rendering: Rendering = DEFAULT_RENDERING) -> str:
        """Renders a conversation with the model's chat template, as text."""
        return self._frontend.inputs.prompts.render_chat(messages, rendering)

    async def abort(self, request_id: str) -> None:
        """Aborts a request; its stream gets a final output with finish_reason "abort"."""
        self._frontend.abort(request_id)

    # -- requests that run -------------------------------------------------------------------------

    async def requests(self, *, recent: bool = False) -> list[LiveRequest]:
        """Returns the waiting and running requests; with `recent` also recently finished ones."""
        self._streams.check_alive()
        view = None
        if self.num_unfinished:
            self.start()
            with contextlib.suppress(Unavailable):  # the core ends while it is asked
                view = await asyncio.to_thread(self._frontend.view)
        requests = self._frontend.requests(view)
        return requests + self._frontend.recent_requests() if recent else requests

    async def update(
        self,
        request_id: str,
        *,
        max_tokens: int | None = None,
        priority: int | None = None,
        stop: str | list[str] | None = None,
    ) -> None:
        """Updates a waiting or running request between two steps. Raises InvalidRequest for a value
        out of range, RequestNotFound for an unknown request.
        """
        self._frontend.change(request_id, RequestUpdate(max_tokens, priority, stop))

    def fork(self, parent_id: str, fork: Fork, *, deltas: bool = False) -> RequestStream:
        """Starts a request that continues another one, running or recently finished, from a given
        token. Both share the KV blocks before it.
        """
        return self.submit_prepared(self.prepare_fork(parent_id, fork), deltas=deltas)

    def prepare_fork(self, parent_id: str, fork: Fork) -> ParentRequest:
        """Checks a fork and returns it for `submit_prepared`."""
        self._streams.check_alive()
        return self._frontend.fork(parent_id, fork)

    async def watch(self) -> FeedReader:
        """Subscribes to the engine's live events: a snapshot, then changes.

        Close the reader at the end: the engine produces events only while there are readers.
        """
        self.check_health()
        self.start()
        self._feed.begin()
        try:
            view = await asyncio.to_thread(
                self._frontend.client.query, ViewEngine(with_blocks=True)
            )
        except BaseException:
            self._feed.end_if_unread()
            raise
        return self._feed.join(as_view(view), self._frontend.stats)

    # -- the engine as a whole ---------------------------------------------------------------------

    def check_health(self) -> None:
        """Raises EngineDead if the core has ended, Unavailable while it is being restarted."""
        self._streams.check_alive()
        self._frontend.check_trouble()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; raises InvalidRequest if the engine runs without one."""
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default sampling params: the model's recommended values."""
        return self._frontend.default_params

    def get_default_chat_params(self) -> SamplingParams:
        """Returns the default params of a chat request: as get_default_sampling_params, but
        max_tokens is None unless the model recommends a value.
        """
        return self._frontend.default_chat_params

    def stats(self) -> EngineStats:
        return self._frontend.stats

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Clears the prefix cache, with `reset_connector` also in host memory and on disk. Returns
        False and does nothing if requests are running.
        """
        self.start()
        query = ResetPrefixCache(reset_connector)
        done = bool(await asyncio.to_thread(self._frontend.client.query, query))
        if done:
            # The core's own event may come later than the next request.
            self._remote_prefill.note_blocks([BlocksCleared()])
        return done

    async def pin_prefix(self, prompt: Prompt, *, ttl_s: float | None = None) -> int:
        """Computes a prompt and keeps its full blocks in `prefix_cache_dir` for `ttl_s` seconds
        (None: indefinitely, 0: unpins it). Returns the number of pinned tokens.
        """
        params = self._frontend.pin_params(ttl_s)
        prefix = await self.compute_prefix(prompt, params)
        return await asyncio.to_thread(self._frontend.pin, prefix, ttl_s)

    async def compute_prefix(
        self,
        prompt: Prompt,
        params: SamplingParams = COMPUTE,
        *,
        adapter: AdapterRef | None = None,
    ) -> PrefixRef:
        """Computes a prompt that is not cached, and returns it as a prefix for `sessions`."""
        self._streams.check_alive()
        prompt = await self.tokenize(prompt)
        request = self._frontend.prepare_request(self._next_id(), prompt, params, adapter=adapter)
        output = await self.submit_prepared(request, deltas=False).final()
        if output.error is not None:
            raise WorkerFailed(output.error)
        return make_prefix(request)

    def get_prefix(self, request_id: str | None = None) -> PrefixRef:
        """Returns the tokens of a running or recently finished request, or of the request that
        finished last, as a prefix for `sessions`.
        """
        return self._frontend.get_prefix(request_id)

    def forget_last(self) -> int:
        """Forgets the request that finished last; returns the number of its tokens."""
        last, self._frontend.outputs.last = self._frontend.outputs.last, None
        return 0 if last is None else last.num_tokens

    @property
    def sessions(self) -> Sessions:
        """Named sessions in `prefix_cache_dir`. Its methods block: call them in threads."""
        self.start()
        return Sessions(self._frontend, partial(time.sleep, POLL_S))

    def close(self) -> None:
        """Shuts down the core; open streams get EngineDead. Thread-safe."""
        self._streams.end(EngineDead("the engine was closed"))
        self._streams.call(self._remote_prefill.close)
        self._frontend.close()
        self._streams.join()
        self.control.close()

    def _next_id(self) -> str:
        return f"request-{next(self._request_ids)}"

    def _compute_for_peer(
        self, token_ids: list[int], cache_salt: str, origin: RequestContext
    ) -> Awaitable[RequestOutput]:
        """Runs the prefill of a prompt for another engine, which fetches the KV blocks."""
        self._streams.check_alive()
        is_ranked = self.config.scheduler.scheduling_policy == "priority"
        request = self._frontend.prepare_request(
            f"prefill-{next(self._request_ids)}",
            {"prompt_token_ids": token_ids, "cache_salt": cache_salt},
            COMPUTE,
            RequestContext(origin.priority if is_ranked else 0, origin.tenant),
        )
        request.samples[0] = msgspec.structs.replace(request.samples[0], sends_kv=True)
        return self.submit_prepared(request, deltas=False).final_or_abandoned()

    def _handle_step(self, step: CoreOutputs) -> None:
        self.limits.update(step)
        self._remote_prefill.note_step(step)
        if step.view is not None:
            self._feed.offer(step.view, step.stats)
