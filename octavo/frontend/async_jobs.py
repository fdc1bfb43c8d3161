"""Calls that consist of several requests on one event loop: batches of pooled texts, and the
windows of an audio file.

Tracks which requests belong to a call, and combines their outputs. The caller prepares and submits
the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from octavo.api.outputs import RequestOutput
from octavo.api.pooling_params import PoolingParams
from octavo.api.transcription import Transcription
from octavo.frontend.arguments import PoolingPrompt
from octavo.frontend.frontend import Frontend
from octavo.frontend.input_processor import ParentRequest, RequestContext
from octavo.frontend.pooling import OutputT, PoolingJob
from octavo.frontend.streams import RequestStream
from octavo.frontend.transcription import SpeechOptions, TranscriptionJob, WindowInput, next_windows

Compute = Callable[[Sequence[ParentRequest]], Awaitable[list[RequestOutput]]]
"""Runs requests together and returns their final outputs in order."""
Prepare = Callable[[str, PoolingPrompt, PoolingParams], Awaitable[ParentRequest]]
"""Checks and tokenizes the prompt of a request with this id."""


class Submit(Protocol):
    """Starts a prepared request."""

    def __call__(self, request: ParentRequest, *, deltas: bool) -> RequestStream: ...


@dataclass(frozen=True, slots=True)
class AsyncJobs:
    """Runs the requests of a call together. Cancelling a call aborts them."""

    frontend: Frontend
    next_id: Callable[[], str]
    prepare_request: Prepare
    submit: Submit

    async def pool(self, job: PoolingJob[OutputT]) -> list[OutputT]:
        """Computes all prompts of a job together and returns its outputs."""
        prepared = [
            await self.prepare_request(self.next_id(), prompt, job.params) for prompt in job.prompts
        ]
        return job.read(await self.all(prepared))

    async def all(self, requests: Sequence[ParentRequest]) -> list[RequestOutput]:
        """Computes requests together and returns their outputs in order."""
        streams: list[RequestStream] = []
        try:
            for request in requests:
                streams.append(self.submit(request, deltas=False))
            return [await stream.final() for stream in streams]
        finally:
            for stream in streams:
                stream.abandon()

    async def transcribe(
        self,
        data: bytes,
        options: SpeechOptions,
        origin: RequestContext,
        compute: Compute | None = None,
    ) -> Transcription:
        """Transcribes an audio file. `compute` runs the requests of its windows; None: `all`."""
        transcriptions, compute = self.frontend.get_transcriptions(), compute or self.all
        options = transcriptions.checked(options)
        sound = await asyncio.to_thread(transcriptions.decoder.sound, data)
        if transcriptions.needs_language(options):
            first = transcriptions.language_request(self.next_id(), sound.window(0.0), origin)
            (detected,) = await compute([first])
            options = replace(options, language=transcriptions.get_language(detected))
        job = TranscriptionJob(transcriptions, sound, options)
        while windows := [window for _, window in next_windows([job])]:
            make_requests = partial(self._sound_requests, windows, options, origin)
            outputs = await compute(await asyncio.to_thread(make_requests))
            for window, output in zip(windows, outputs, strict=True):
                await asyncio.to_thread(job.add_output, window, output)
        return job.result()

    def _sound_requests(
        self, windows: Sequence[WindowInput], options: SpeechOptions, origin: RequestContext
    ) -> list[ParentRequest]:
        transcriptions = self.frontend.get_transcriptions()
        return [transcriptions.request(self.next_id(), one, options, origin) for one in windows]
