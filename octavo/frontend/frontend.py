"""Frontend of an engine: the common part of LLM and AsyncLLM, from prompt to output.

Owns the input processor, the output processor, a client of the core and the latest stats. Reads the
clock only to stamp arrivals. Starts no thread and uses no event loop: the caller decides when to
call `receive`. Not thread-safe, except for `close` and the methods marked as such.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.api.errors import InvalidRequest, RequestNotFound, Unavailable
from octavo.api.lora_request import LoRARequest
from octavo.api.pooling_params import (
    MarkedText,
    PoolingParams,
    PoolingTask,
    RequestParams,
    TextPair,
)
from octavo.api.sampling_params import SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineClient, EngineInfo, as_number, as_view
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.ports import Profiler
from octavo.engine.protocol.requests import PrefixRef, RequestChange, ViewEngine
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import AdapterRef
from octavo.engine.protocol.view import EngineView
from octavo.frontend.adapter_names import AdapterNames
from octavo.frontend.arguments import Messages, PoolingPrompt, Prompt
from octavo.frontend.changes import Fork, RequestUpdate, changed, forked
from octavo.frontend.input_processor import (
    DEFAULT_CONTEXT,
    InputProcessor,
    ParentRequest,
    RequestContext,
)
from octavo.frontend.live_requests import LiveRequest, live_request, views_by_id
from octavo.frontend.output_processor import KEPT_S, OutputProcessor, RequestState
from octavo.frontend.pins import COMPUTE, check_pin, make_pin, make_prefix
from octavo.frontend.pooling import PoolingInputs, PoolingJobs
from octavo.frontend.prompt_inputs import Truncation
from octavo.frontend.sampling_defaults import SamplingDefaults
from octavo.frontend.transcription import Transcriptions
from octavo.text.ports import DEFAULT_RENDERING, Rendering, Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.kv_event_publisher import KVEventPublisher

TASKS: Mapping[PoolingTask, str] = {
    "embed": "make embeddings",
    "classify": "classify texts",
    "token_embed": "make embeddings of tokens",
    "token_classify": "classify tokens",
}
"""Descriptions of the tasks for error messages."""


@dataclass(slots=True)
class Frontend:
    """Interface of one engine: takes prompts and params, returns texts."""

    config: EngineConfig
    """All options, including derived ones."""
    client: EngineClient
    inputs: InputProcessor
    pooling: PoolingInputs | None
    """Validates pooling requests; None for a generative model."""
    outputs: OutputProcessor
    sampling: SamplingDefaults
    """Default sampling values of the model."""
    transcriptions: Transcriptions | None = None
    """Builds transcription requests; None for a model without audio input."""
    adapters: AdapterNames | None = None
    """Adapters that requests may use; None if LoRA is disabled."""
    profiler: Profiler | None = None
    """Profiler of a core in this process; None for a core in another process."""
    publishers: Sequence[KVEventPublisher] = ()
    """Publishers of each engine's KV events; () if none are published."""
    stats: EngineStats = field(default_factory=EngineStats)
    """Gauges and counters after the last step."""

    @property
    def info(self) -> EngineInfo:
        """Properties of the started core, such as vocabulary size, context length and KV
        capacity.
        """
        return self.client.info

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running samples; a request has n."""
        return self.outputs.num_unfinished

    @property
    def default_params(self) -> SamplingParams:
        """Default params; raises InvalidRequest if the model does not generate."""
        self.check_generates()
        return self.sampling.params

    @property
    def default_chat_params(self) -> SamplingParams:
        """Default params of a chat request; max_tokens is None unless the model recommends a
        value.
        """
        self.check_generates()
        return self.sampling.chat_params

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises InvalidRequest if the engine runs without one."""
        if self.inputs.tokenizer is None:
            raise InvalidRequest(
                "this engine has no tokenizer", hint="start it without skip_tokenizer_init"
            )
        return self.inputs.tokenizer

    @property
    def task(self) -> PoolingTask | None:
        """Task of a pooling model; None for a generative model."""
        return None if self.pooling is None else self.pooling.pools.task

    @property
    def media(self) -> frozenset[str]:
        """Media types that the model accepts besides text: "image", "video" and "audio" in prompts;
        "speech" if it transcribes.
        """
        speech = {"speech"} if self.transcriptions is not None else set()
        return frozenset({*self.inputs.prompts.media.kinds, *speech})

    @property
    def pooling_jobs(self) -> PoolingJobs:
        """Builds the jobs of a pooling model."""
        return PoolingJobs(self.get_pooling_inputs)

    # -- requests ----------------------------------------------------------------------------------

    def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> dict[str, Any]:
        """Returns a prompt with its token ids, as an argument of `prepare_request`. Raises
        ContextTooLong if it cannot fit. Thread-safe.
        """
        return self.inputs.prompts.tokenize(
            prompt, add_special_tokens=add_special_tokens, truncation=truncation
        )

    def prepare_request(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: RequestParams,
        origin: RequestContext = DEFAULT_CONTEXT,
        *,
        adapter: AdapterRef | None = None,
    ) -> ParentRequest:
        """Validates and tokenizes a request; raises an error if it is invalid. Does not register or
        run it.
        """
        if isinstance(params, PoolingParams):
            return self.get_pooling_inputs(*TASKS).process(request_id, prompt, params, origin)
        if self.pooling is not None:
            self.check_generates()
        if isinstance(prompt, TextPair | MarkedText):
            raise InvalidRequest(
                "prompt: got a pair of texts, expected one text; pairs require a classifier",
                param="prompt",
            )
        return self.inputs.process(request_id, prompt, params, origin, adapter=adapter)

    def adapter(self, request: LoRARequest) -> AdapterRef:
        """Reads and checks the adapter of a request; raises InvalidRequest if it is invalid.
        Thread-safe.
        """
        if self.adapters is None:
            raise InvalidRequest(
                "lora_request: LoRA is disabled on this engine",
                hint="start it with enable_lora",
                param="lora_request",
            )
        return self.adapters.find(request)

    def get_pooling_inputs(self, *tasks: PoolingTask) -> PoolingInputs:
        """Returns the object that validates pooling requests; raises InvalidRequest if the model
        has none of the tasks.
        """
        name = self.config.model.served_model_name
        what = " or ".join(TASKS[task] for task in tasks)
        if self.pooling is None:
            raise InvalidRequest(
                f"model: {name} generates text and does not {what}",
                hint="use an encoder, such as minilm",
                param="model",
            )
        own = self.pooling.pools.task
        if own not in tasks:
            raise InvalidRequest(
                f"model: {name} can {TASKS[own]} and does not {what}",
                param="model",
                hint="GET /v1/capabilities lists what a model supports",
            )
        return self.pooling

    def get_transcriptions(self) -> Transcriptions:
        """Returns the builder of transcription requests; raises InvalidRequest if the model does
        not accept audio.
        """
        if self.transcriptions is None:
            raise InvalidRequest(
                f"model: {self.config.model.served_model_name} accepts text, not audio",
                hint="use a speech model, such as whisper-tiny.en",
                param="model",
            )
        return self.transcriptions

    def check_generates(self) -> None:
        """Raises InvalidRequest if the model does not generate text."""
        if self.pooling is not None:
            name = self.config.model.served_model_name
            does = TASKS[self.pooling.pools.task]
            raise InvalidRequest(
                f"model: {name} can {does} and does not generate text",
                hint="use a text generation model, such as smollm2",
                param="model",
            )

    def submit(self, request: ParentRequest) -> None:
        """Sends a prepared request to the core. If that fails, removes the request and raises the
        error.
        """
        self.outputs.add(request)
        try:
            self.client.add(request.samples)
        except BaseException:
            self.outputs.discard(request.request_id)
            raise

    def process_outputs(self, step: CoreOutputs) -> dict[str, bool]:
        """Adds the outputs that `client.receive` returned to their requests, and aborts samples
        that ended at a stop string. Returns the ids of requests with a new output; True if it is
        the final one.
        """
        self.stats = step.stats
        if step.block_events and self.publishers:
            self.publishers[step.engine].publish(step.block_events)
        effects = self.outputs.process(step.outputs, time.monotonic())
        if effects.abort_ids:
            self.client.abort(effects.abort_ids)
        return effects.changed

    def abort(self, request_id: str) -> None:
        """Aborts a request; its final output has the finish_reason "abort"."""
        unfinished = self.outputs.unfinished_ids(request_id)
        if unfinished:
            self.client.abort(unfinished)

    def drop(self, request_id: str) -> None:
        """Aborts and removes a request whose outputs are no longer read."""
        self.abort(request_id)
        self.outputs.discard(request_id)

    # -- running requests --------------------------------------------------------------------------

    def view(self, *, with_blocks: bool = False) -> EngineView | None:
        """Returns a view of the core's state; None while it is being replaced. Thread-safe."""
        return None if self.client.trouble else as_view(self.client.query(ViewEngine(with_blocks)))

    def requests(self, view: EngineView | None) -> list[LiveRequest]:
        """Returns the waiting and running requests, the oldest first."""
        views, trouble = views_by_id(view), self.client.trouble
        return [live_request(one, views, trouble=trouble) for one in self.outputs.unfinished()]

    def recent_requests(self) -> list[LiveRequest]:
        """Returns the recently finished requests, which can still be forked."""
        return [live_request(one, {}) for one in self.outputs.recent(time.monotonic())]

    def compute_here(self, request_id: str) -> None:
        """Makes a request compute its prompt here instead of waiting for another engine. Does
        nothing if it is not waiting for one.
        """
        state = self.outputs.find(request_id, time.monotonic())
        if state is not None and state.num_unfinished:
            first = state.request.samples[0]
            change = RequestChange(
                first.request_id, first.params, first.priority, computes_here=True
            )
            self.client.change([change])

    def change(self, request_id: str, update: RequestUpdate) -> None:
        """Changes a waiting or running request; the core applies the change between two steps."""
        state = self._find(request_id)
        if not state.num_unfinished:
            raise InvalidRequest(f"request {request_id!r} has finished; it can only be forked")
        request = changed(self.inputs, state, update)
        unfinished = set(self.outputs.unfinished_ids(request_id))
        self.outputs.change(request)
        self.client.change(
            [
                RequestChange(one.request_id, one.params, one.priority)
                for one in request.samples
                if one.request_id in unfinished
            ]
        )

    def fork(self, parent_id: str, fork: Fork) -> ParentRequest:
        """Prepares a request that continues a running or recently finished one from a certain
        token.
        """
        return forked(self.inputs, self._find(parent_id), fork)

    def _find(self, request_id: str) -> RequestState:
        state = self.outputs.find(request_id, time.monotonic())
        if state is None:
            raise RequestNotFound(
                f"no request {request_id!r}: unknown, or finished more than {KEPT_S:g} seconds ago"
            )
        return state

    # -- conversations -----------------------------------------------------------------------------

    def chat_prompt(
        self,
        messages: Messages,
        rendering: Rendering = DEFAULT_RENDERING,
        truncation: Truncation | None = None,
    ) -> dict[str, Any]:
        """Renders a conversation through the model's chat template, as a prompt of token ids."""
        self.check_generates()
        return self.inputs.prompts.chat_prompt(messages, rendering, truncation)

    # -- engine state and shutdown -----------------------------------------------------------------

    def check_trouble(self) -> None:
        """Raises Unavailable while an engine that failed is being replaced."""
        if self.client.trouble:
            raise Unavailable(self.client.trouble)

    def pin_params(self, ttl_s: float | None) -> SamplingParams:
        """Returns the params for computing a prompt that will be pinned. Raises InvalidRequest if
        this engine cannot pin prompts, or not for `ttl_s` seconds.
        """
        check_pin(ttl_s, self.config.cache)
        return COMPUTE

    def pin(self, prefix: PrefixRef, ttl_s: float | None) -> int:
        """Keeps the blocks of a computed prefix on disk for `ttl_s` seconds (None: indefinitely);
        returns the number of tokens in these blocks.
        """
        return as_number(self.client.query(make_pin(prefix, ttl_s)))

    def get_prefix(self, request_id: str | None = None) -> PrefixRef:
        """Returns the tokens of a running or recently finished request, or of the request that
        finished last: its prompt, and the output of its first sample.
        """
        state = self.outputs.last if request_id is None else self._find(request_id)
        if state is None:
            raise RequestNotFound("no request has finished yet")
        return make_prefix(state.request, state.samples[0].token_ids)

    def close(self) -> None:
        """Shuts down the core and releases its threads and memory."""
        self.client.close()
        for publisher in self.publishers:
            publisher.close()
