"""LLM: an engine in the caller's own process, for batches of prompts.

The core is stepped by a caller that waits for its outputs. Several threads may call: their requests
run together, one of them steps the core for all, and each gets its own outputs. All that LLM shares
with AsyncLLM is its `Frontend`'s.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from octavo.api.beam_search_params import BeamSearchParams
from octavo.api.errors import EngineDead, InvalidRequest, shown
from octavo.api.lora_request import LoRARequest
from octavo.api.outputs import Profile, RequestOutput
from octavo.api.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from octavo.api.pooling_params import PoolingParams
from octavo.api.sampling_params import SamplingParams
from octavo.api.transcription import Transcription
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineInfo
from octavo.engine.protocol.ports import Profiler
from octavo.engine.protocol.stats import EngineStats
from octavo.frontend.arguments import (
    Messages,
    Prompt,
    adapter_for_each,
    conversation_list,
    params_for_each,
    pooling_params_of,
    priority_for_each,
    prompt_list,
)
from octavo.frontend.input_processor import ParentRequest, RequestContext
from octavo.frontend.pooling import OutputT, PoolingJob, PoolingPrompts, Texts
from octavo.frontend.transcription import (
    Listening,
    Sound,
    SpeechOptions,
    SpeechTask,
    next_windows,
    sound_bytes,
)
from octavo.text.ports import Rendering, Tokenizer
from octavo.utils.progress import Bar, Report, to_stderr
from octavo.wiring.engine import build_in_process


class LLM:
    """An engine in this process, for batches of prompts; any thread may call it at any time.

    `LLM(model="smollm2").generate("Hello")`. Options are the fields of `octavo.config`; an unknown
    one is refused by name.
    """

    def __init__(
        self, model: str | None = None, *, report: Report = to_stderr, **options: Any
    ) -> None:
        """Loads a model; `report` is told what is being done."""
        given = options if model is None else {"model": model, **options}
        self.front = build_in_process(EngineConfig.from_options(**given), report)
        """Frontend that prepares the requests and holds the client of the core; for code that steps
        the core itself, while no other thread calls.
        """
        self._request_ids = itertools.count()
        self._changed: set[str] = set()
        """Ids of requests with something new that their reader has not seen; several streams may be
        read in turns.
        """
        self._turn = threading.Condition(threading.Lock())
        """Guards the front and what is below; its waiters are told of every step."""
        self._is_stepping = False
        """Whether some thread steps the core, without the lock."""
        self._is_closed = False

    @property
    def config(self) -> EngineConfig:
        """Every option, derived ones included."""
        return self.front.config

    @property
    def info(self) -> EngineInfo:
        """Vocabulary, context and what the KV cache holds."""
        return self.front.info

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: int | Iterable[int] = 0,
    ) -> list[RequestOutput]:
        """Computes the prompts together and returns their final outputs, in the prompts' order.

        `sampling_params`, `lora_request` and `priority` are one for all, or one for each; without
        params the model's own defaults hold. All prompts are checked before any is computed. A
        request that fails while it is computed has an output with `error` set; the others are not
        touched.
        """
        requests = self._requests(prompt_list(prompts), sampling_params, priority, lora_request)
        return self._finals("prompts", requests, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Computes the embeddings of texts together and returns them in the texts' order.

        `truncate_prompt_tokens` is what PoolingParams call so. A text longer than the model takes
        is refused without it.
        """
        params = pooling_params_of(pooling_params, truncate_prompt_tokens)
        return self._pool(self.front.pooling_jobs.embedding(prompts, params), use_tqdm=use_tqdm)

    def classify(
        self,
        prompts: PoolingPrompts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Classifies texts, or pairs of them (TextPair), together and returns what the model says
        of each, in their order.
        """
        params = pooling_params_of(pooling_params, truncate_prompt_tokens)
        return self._pool(
            self.front.pooling_jobs.classification(prompts, params), use_tqdm=use_tqdm
        )

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores each text of `data_2` with the text of `data_1`, or with the one at the same
        place: a cross-encoder reads both together, embeddings are compared by their cosine.
        """
        params = pooling_params_of(pooling_params, truncate_prompt_tokens)
        return self._pool(
            self.front.pooling_jobs.scoring(data_1, data_2, params), use_tqdm=use_tqdm
        )

    def transcribe(
        self,
        sounds: Sound | Iterable[Sound],
        *,
        language: str | None = None,
        task: SpeechTask = "transcribe",
        temperature: float = 0.0,
        timestamps: bool | None = False,
        prompt: str | None = None,
        seed: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Transcription]:
        """Turns sound files (WAV, FLAC, OGG, MP3), as bytes or paths, into text, in their order.

        `language` is a code such as "en"; without it a multilingual model finds it. `translate` as
        the `task` gives English. With `timestamps` segments begin and end where the model hears
        them, and a window begins where the last one's text ends; else each segment is a window of
        30 seconds. `prompt` is a text that goes before, in whose spelling and style it goes on.
        """
        hearing = self.front.hearing
        given = SpeechOptions(
            language, task, temperature, timestamps=timestamps, prompt=prompt, seed=seed
        )
        options = hearing.checked(given)
        files = [sounds] if isinstance(sounds, bytes | str | Path) else list(sounds)
        heard = [hearing.hearing.sound(one) for one in map(sound_bytes, files)]
        asked = [options] * len(files)
        if hearing.asks_language(options):
            first = [
                hearing.language_request(str(next(self._request_ids)), sound.window(0.0))
                for sound in heard
            ]
            found = self._finals("languages", first, use_tqdm=False)
            asked = [replace(options, language=hearing.language_of(one)) for one in found]
        listenings = [
            Listening(hearing, sound, own) for sound, own in zip(heard, asked, strict=True)
        ]
        while parts := next_windows(listenings):
            requests = [
                hearing.request(str(next(self._request_ids)), window, one.options)
                for one, window in parts
            ]
            finals = self._finals("windows", requests, use_tqdm=use_tqdm)
            for (one, window), output in zip(parts, finals, strict=True):
                one.take(window, output)
        return [one.result() for one in listenings]

    def _pool(self, job: PoolingJob[OutputT], *, use_tqdm: bool) -> list[OutputT]:
        requests = [
            self.front.prepare(str(next(self._request_ids)), prompt, job.params)
            for prompt in job.prompts
        ]
        return job.read(self._finals("texts", requests, use_tqdm=use_tqdm))

    def _finals(
        self, what: str, requests: list[ParentRequest], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Runs requests to their ends and returns their final outputs, in their order."""
        done: dict[str, RequestOutput] = {}
        with Bar(what, len(requests), enabled=use_tqdm) as bar:
            for output in self._run(requests, streaming=False):
                done[output.request_id] = output
                bar.advance()
        return [done[request.request_id] for request in requests]

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, **options: Any
    ) -> list[RequestOutput]:
        """Searches for the most likely sequences after each prompt; returns them best first, with
        their scores. `options` are those of `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params: got {shown(params)}, allowed is BeamSearchParams",
                hint="SamplingParams with a beam_width are for generate",
            )
        return self.generate(prompts, params.sampling_params(), **options)

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        **rendering: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template; `rendering` as in
        `chat_prompt`.
        """
        prompts = [
            self.chat_prompt(conversation, **rendering)
            for conversation in conversation_list(messages)
        ]
        if sampling_params is None:
            sampling_params = self.get_default_chat_params()
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Renders a conversation through the model's chat template, as a prompt for `generate` or
        `stream`. It ends with the beginning of an answer, or with `continue_final_message` within
        the last message.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        rendering = Rendering(
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs or {},
            chat_template,
        )
        return self.front.chat_prompt(messages, rendering)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields one request's outputs as they grow, each with all of it so far; leaving the loop
        aborts the request.
        """
        requests = self._requests([prompt], sampling_params, lora_request=lora_request)
        return self._run(requests, streaming=True)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; InvalidRequest where the engine runs without one."""
        return self.front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the params of a request that sets none: the model's recommended values."""
        return self.front.default_params

    def get_default_chat_params(self) -> SamplingParams:
        """Returns the params of a chat request that sets none: as get_default_sampling_params, but
        max_tokens is None unless one is recommended.
        """
        return self.front.default_chat_params

    def get_metrics(self) -> EngineStats:
        """Returns gauges and counters after the last step."""
        return self.front.stats

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forgets the KV of earlier prompts, with `reset_connector` in host memory and on disk too;
        returns False, and does nothing, while requests run.
        """
        return self.front.reset_prefix_cache(reset_connector=reset_connector)

    def pin_prefix(self, prompt: Prompt, *, ttl_s: float | None = None) -> int:
        """Computes a prompt and keeps its whole blocks in `prefix_cache_dir` for `ttl_s` seconds
        (None: for good, 0: no longer); returns how many tokens these blocks hold.
        """
        params = self.front.pin_params(ttl_s)
        (computed,) = self.generate(prompt, params, use_tqdm=False)
        return self.front.pin(computed, prompt, ttl_s)

    def start_profile(self) -> None:
        """Times each kind of op from now on; BackendUnavailable where the backend cannot."""
        self._profiler().start_profile()

    def stop_profile(self) -> Profile:
        """Returns where the time went since start_profile, and measures what this machine can do
        at most.
        """
        return self._profiler().stop_profile()

    def _profiler(self) -> Profiler:
        if self.front.profiler is None:
            raise InvalidRequest(
                "several engines cannot be profiled at once", hint="set data_parallel_size to 1"
            )
        return self.front.profiler

    def close(self) -> None:
        """Gives back threads and memory; calls that wait in other threads get EngineDead."""
        self._is_closed = True
        self.front.close()
        with self._turn:
            self._turn.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        priority: int | Iterable[int] = 0,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
    ) -> list[ParentRequest]:
        """Checks and tokenizes all prompts of one call."""
        of_each = params_for_each(
            self.get_default_sampling_params() if params is None else params, len(prompts)
        )
        origins = map(RequestContext, priority_for_each(priority, len(prompts)))
        adapters = adapter_for_each(lora_request, len(prompts))
        return [
            self._request(adapter, prompt, one, origin)
            for adapter, prompt, one, origin in zip(
                adapters, prompts, of_each, origins, strict=True
            )
        ]

    def _request(
        self,
        named: LoRARequest | None,
        prompt: Prompt,
        params: SamplingParams,
        origin: RequestContext,
    ) -> ParentRequest:
        adapter = None if named is None else self.front.adapter(named)
        request_id = str(next(self._request_ids))
        request = self.front.prepare(request_id, prompt, params, origin, adapter=adapter)
        request.lora_request = named
        return request

    def _run(self, requests: list[ParentRequest], *, streaming: bool) -> Iterator[RequestOutput]:
        """Yields outputs as they change (`streaming`) or as they finish; leaving it early aborts
        what still runs.
        """
        unfinished = {request.request_id for request in requests}
        try:
            with self._turn:
                for request in requests:
                    self.front.submit(request)
            while unfinished:
                for output in self._next_outputs(unfinished, streaming=streaming):
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            with self._turn:
                for request_id in unfinished:
                    self.front.drop(request_id)
                    self._changed.discard(request_id)

    def _next_outputs(self, request_ids: set[str], *, streaming: bool) -> list[RequestOutput]:
        """Waits until one of the requests has something new; returns the outputs that are wanted of
        it, which may be none.
        """
        with self._turn:
            while not (changed := self._changed & request_ids):
                if self._is_closed:
                    raise EngineDead("the engine was closed")
                if self._is_stepping:
                    self._turn.wait()
                else:
                    self._step()
            self._changed -= changed
            wanted = [name for name in changed if streaming or self.front.is_finished(name)]
            return [self.front.output(name) for name in wanted]

    def _step(self) -> None:
        """Steps the core once, for the requests of all threads. The caller's lock is given up for
        that time.
        """
        self._is_stepping = True
        self._turn.release()
        try:
            step = self.front.receive()
        finally:
            self._turn.acquire()
            self._is_stepping = False
            self._turn.notify_all()
        if step is not None:
            self._changed.update(self.front.take(step))
