"""LLM: an engine in the caller's process, for batches of prompts.

There is no background thread: a caller that waits for outputs steps the engine. With several
calling threads, one steps the engine for all, and each receives its own outputs.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from octavo.api.beam_search_params import BeamSearchParams
from octavo.api.errors import EngineDead, InvalidRequest, WorkerFailed, shown
from octavo.api.lora_request import LoRARequest
from octavo.api.outputs import Profile, RequestOutput
from octavo.api.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from octavo.api.pooling_params import PoolingParams
from octavo.api.sampling_params import SamplingParams
from octavo.api.transcription import Transcription, VoiceActivity
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineInfo
from octavo.engine.protocol.ports import Profiler
from octavo.engine.protocol.requests import PrefixRef, ResetPrefixCache
from octavo.engine.protocol.stats import EngineStats
from octavo.frontend.arguments import (
    Messages,
    Prompt,
    adapter_for_each,
    conversation_list,
    get_pooling_params,
    params_for_each,
    priority_for_each,
    prompt_list,
)
from octavo.frontend.input_processor import ParentRequest, RequestContext
from octavo.frontend.pins import COMPUTE, make_prefix
from octavo.frontend.pooling import OutputT, PoolingJob, PoolingPrompts, Texts
from octavo.frontend.sessions import POLL_S, Sessions
from octavo.frontend.transcription import (
    Sound,
    SpeechOptions,
    SpeechTask,
    TranscriptionJob,
    next_windows,
    read_audio_bytes,
)
from octavo.text.ports import Rendering, Tokenizer
from octavo.utils.progress import Bar, Report, to_stderr
from octavo.wiring.engine import build_in_process

REQUEST_ID = attrgetter("request_id")


class LLM:
    """An engine in this process, for batches of prompts; thread-safe.

    `LLM(model="smollm2").generate("Hello")`. Options are the fields of `octavo.config`; unknown
    options raise ConfigError.
    """

    def __init__(
        self, model: str | None = None, *, report: Report = to_stderr, **options: Any
    ) -> None:
        """Loads a model; `report` receives progress messages."""
        given = options if model is None else {"model": model, **options}
        self.frontend = build_in_process(EngineConfig.from_options(**given), report)
        """Prepares requests and holds the engine client; for code that steps the engine itself,
        while no other thread calls.
        """
        self._request_ids = itertools.count()
        self._changed: dict[str, bool] = {}
        """Requests with a new output that was not read, and whether it is their final one."""
        self._turn = threading.Condition(threading.Lock())
        """Guards `frontend` and the fields below; notified after each step."""
        self._is_stepping = False
        """Whether a thread is stepping the engine (without holding the lock)."""
        self._is_closed = False

    @property
    def config(self) -> EngineConfig:
        """All options, including derived ones."""
        return self.frontend.config

    @property
    def info(self) -> EngineInfo:
        return self.frontend.info

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: int | Iterable[int] = 0,
    ) -> list[RequestOutput]:
        """Generates completions for a batch of prompts and returns the final outputs, in order.

        `sampling_params`, `lora_request` and `priority` are one value for all prompts, or one for
        each; the default params are the model's. All prompts are checked before any of them runs. A
        request that fails while it runs has an output with `error` set; the others are not
        affected.
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
        """Returns the embeddings of texts, in order.

        `truncate_prompt_tokens` is the field of PoolingParams; without it, a text longer than the
        model's context is rejected.
        """
        params = get_pooling_params(pooling_params, truncate_prompt_tokens)
        return self._pool(self.frontend.pooling_jobs.embedding(prompts, params), use_tqdm=use_tqdm)

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns what the model pools of texts, in order: an embedding, an embedding of each
        token (late interaction), or probabilities.
        """
        params = get_pooling_params(pooling_params, truncate_prompt_tokens)
        return self._pool(self.frontend.pooling_jobs.pooling(prompts, params), use_tqdm=use_tqdm)

    def classify(
        self,
        prompts: PoolingPrompts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Classifies texts or pairs of texts (TextPair) and returns the results in order."""
        params = get_pooling_params(pooling_params, truncate_prompt_tokens)
        return self._pool(
            self.frontend.pooling_jobs.classification(prompts, params), use_tqdm=use_tqdm
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
        """Scores each text of `data_2` against the text of `data_1` (or the one with the same
        index): with a cross-encoder, or by cosine similarity of embeddings.
        """
        params = get_pooling_params(pooling_params, truncate_prompt_tokens)
        return self._pool(
            self.frontend.pooling_jobs.scoring(data_1, data_2, params), use_tqdm=use_tqdm
        )

    def transcribe(
        self,
        sounds: Sound | Iterable[Sound],
        *,
        language: str | None = None,
        task: SpeechTask = "transcribe",
        temperature: float = 0.0,
        timestamps: bool | None = False,
        words: bool = False,
        prompt: str | None = None,
        seed: int | None = None,
        chunking: VoiceActivity | None = None,
        use_tqdm: bool = True,
    ) -> list[Transcription]:
        """Transcribes audio files (WAV, FLAC, OGG, MP3), given as bytes or paths, in order.

        `language` is a code such as "en"; by default a multilingual model detects it. `task`
        "translate" translates to English. With `timestamps` segments have the timestamps that the
        model predicts, and each window begins where the last segment ended; otherwise each segment
        is a window of 30 seconds. `words` finds the time of each word. `prompt` is preceding text;
        the transcript continues its spelling and style. `chunking` detects speech: silence is
        skipped, and windows end in pauses.
        """
        transcriptions = self.frontend.get_transcriptions()
        options_given = SpeechOptions(
            language,
            task,
            temperature,
            timestamps=timestamps,
            words=words,
            prompt=prompt,
            seed=seed,
            chunking=chunking,
        )
        options = transcriptions.checked(options_given)
        files = [sounds] if isinstance(sounds, bytes | str | Path) else list(sounds)
        audio_files = [transcriptions.decoder.sound(data) for data in map(read_audio_bytes, files)]
        options_by_file = [options] * len(files)
        if transcriptions.needs_language(options):
            first = [
                transcriptions.language_request(str(next(self._request_ids)), sound.window(0.0))
                for sound in audio_files
            ]
            language_outputs = self._finals("languages", first, use_tqdm=False)
            options_by_file = [
                replace(options, language=transcriptions.get_language(output))
                for output in language_outputs
            ]
        jobs = [
            TranscriptionJob(transcriptions, sound, file_options)
            for sound, file_options in zip(audio_files, options_by_file, strict=True)
        ]
        while parts := next_windows(jobs):
            requests = [
                transcriptions.request(str(next(self._request_ids)), window, job.options)
                for job, window in parts
            ]
            finals = self._finals("windows", requests, use_tqdm=use_tqdm)
            for (job, window), output in zip(parts, finals, strict=True):
                job.add_output(window, output)
        return [job.result() for job in jobs]

    def _pool(self, job: PoolingJob[OutputT], *, use_tqdm: bool) -> list[OutputT]:
        requests = [
            self.frontend.prepare_request(str(next(self._request_ids)), prompt, job.params)
            for prompt in job.prompts
        ]
        return job.read(self._finals("texts", requests, use_tqdm=use_tqdm))

    def _finals(
        self, description: str, requests: list[ParentRequest], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Runs requests to completion and returns their final outputs, in order."""
        done: dict[str, RequestOutput] = {}
        is_shown = use_tqdm and sys.stderr.isatty()
        with Bar(description, len(requests)) if is_shown else nullcontext() as bar:
            for output in self._run(requests, streaming=False):
                done[output.request_id] = output
                if bar is not None:
                    bar.advance()
        return list(map(done.__getitem__, map(REQUEST_ID, requests)))

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, **options: Any
    ) -> list[RequestOutput]:
        """Runs a beam search for each prompt; the outputs are sorted by score, best first.
        `options` are those of `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params: got {shown(params)}, expected BeamSearchParams",
                hint="pass SamplingParams with a beam_width to generate",
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
        """Generates a response to one conversation or several, with the model's chat template.
        `rendering` as in `chat_prompt`.
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
        """Renders a conversation with the model's chat template, as a prompt for `generate` or
        `stream`.

        It ends with the start of the assistant's message; with `continue_final_message`, inside the
        last message.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        rendering = Rendering(
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs or {},
            chat_template,
        )
        return self.frontend.chat_prompt(messages, rendering)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields one request's cumulative outputs; leaving the loop aborts the request."""
        requests = self._requests([prompt], sampling_params, lora_request=lora_request)
        return self._run(requests, streaming=True)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; raises InvalidRequest if the engine runs without one."""
        return self.frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default sampling params: the model's recommended values."""
        return self.frontend.default_params

    def get_default_chat_params(self) -> SamplingParams:
        """Returns the default params of a chat request: as get_default_sampling_params, but
        max_tokens is None unless the model recommends a value.
        """
        return self.frontend.default_chat_params

    def get_metrics(self) -> EngineStats:
        return self.frontend.stats

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Clears the prefix cache, with `reset_connector` also in host memory and on disk. Returns
        False and does nothing if requests are running.
        """
        return bool(self.frontend.client.query(ResetPrefixCache(reset_connector)))

    def pin_prefix(self, prompt: Prompt, *, ttl_s: float | None = None) -> int:
        """Computes a prompt and keeps its full blocks in `prefix_cache_dir` for `ttl_s` seconds
        (None: indefinitely, 0: unpins it). Returns the number of pinned tokens.
        """
        params = self.frontend.pin_params(ttl_s)
        return self.frontend.pin(self.compute_prefix(prompt, params), ttl_s)

    def compute_prefix(
        self,
        prompt: Prompt,
        params: SamplingParams = COMPUTE,
        *,
        lora_request: LoRARequest | None = None,
    ) -> PrefixRef:
        """Computes a prompt that is not cached, and returns it as a prefix for `sessions`."""
        (request,) = self._requests([prompt], params, lora_request=lora_request)
        (output,) = self._run([request], streaming=False)
        if output.error is not None:
            raise WorkerFailed(output.error)
        return make_prefix(request)

    @property
    def sessions(self) -> Sessions:
        """Named sessions in `prefix_cache_dir`."""
        return Sessions(self.frontend, self._work)

    def start_profile(self) -> None:
        """Starts timing each kind of op. Raises BackendUnavailable if the backend does not support
        it.
        """
        self._profiler().start_profile()

    def stop_profile(self) -> Profile:
        """Stops profiling and returns the times, with measured peak rates of this machine."""
        return self._profiler().stop_profile()

    def _profiler(self) -> Profiler:
        if self.frontend.profiler is None:
            raise InvalidRequest(
                "profiling requires a single engine, got several",
                hint="set data_parallel_size to 1",
            )
        return self.frontend.profiler

    def close(self) -> None:
        """Frees threads and memory; calls waiting in other threads raise EngineDead."""
        self._is_closed = True
        self.frontend.close()
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
        if params is None:
            params = self.get_default_sampling_params()
        requests = []
        for prompt, own, own_priority, named in zip(
            prompts,
            params_for_each(params, len(prompts)),
            priority_for_each(priority, len(prompts)),
            adapter_for_each(lora_request, len(prompts)),
            strict=True,
        ):
            adapter = None if named is None else self.frontend.adapter(named)
            request_id, context = str(next(self._request_ids)), RequestContext(own_priority)
            request = self.frontend.prepare_request(
                request_id, prompt, own, context, adapter=adapter
            )
            request.lora_request = named
            requests.append(request)
        return requests

    def _run(self, requests: list[ParentRequest], *, streaming: bool) -> Iterator[RequestOutput]:
        """Yields outputs as they change (`streaming`) or finish; closing it aborts the remaining
        requests.
        """
        unfinished = set(map(REQUEST_ID, requests))
        try:
            with self._turn:
                for request in requests:
                    self.frontend.submit(request)
            while unfinished:
                for output in self._next_outputs(unfinished, streaming=streaming):
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            with self._turn:
                for request_id in unfinished:
                    self.frontend.drop(request_id)
                    self._changed.pop(request_id, None)

    def _work(self) -> None:
        """Makes a step if there is work and no other thread steps the engine."""
        with self._turn:
            if not self._is_stepping and (step := self.frontend.client.receive(POLL_S)) is not None:
                self._changed |= self.frontend.process_outputs(step)

    def _next_outputs(self, request_ids: set[str], *, streaming: bool) -> list[RequestOutput]:
        """Waits until one of the requests has a new output, and returns those that are wanted:
        without `streaming` the final ones only. One of the waiting threads steps the core for all.
        """
        outputs: list[RequestOutput] = []
        with self._turn:
            while not (changed := self._changed.keys() & request_ids):
                if self._is_closed:
                    raise EngineDead("the engine was closed", hint="create a new LLM")
                if self._is_stepping:
                    self._turn.wait()
                    continue
                self._is_stepping = True
                self._turn.release()
                try:
                    step = self.frontend.client.receive()
                finally:
                    self._turn.acquire()
                    self._is_stepping = False
                    self._turn.notify_all()
                if step is not None:
                    self._changed |= self.frontend.process_outputs(step)
            for request_id in changed:
                is_final = self._changed.pop(request_id)
                if streaming or is_final:
                    outputs.append(self.frontend.outputs.output(request_id))
        return outputs
