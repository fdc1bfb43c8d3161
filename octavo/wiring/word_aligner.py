"""Aligns the tokens of a speech model with the audio, for word timestamps.

Runs Programs of its own, which return the queries and keys of the alignment heads, in the process
of the API. They are loaded when the first words are aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from octavo.audio.word_alignment import attention_weights, find_token_steps
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.engine.protocol.step import EncoderInput
from octavo.executor.base import Runnable
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE, KvCache
from octavo.program.program import Program
from octavo.wiring.backend import build_backend
from octavo.wiring.model import Model
from octavo.worker.loaded_model import get_common_layouts


class ModelWordAligner:
    """Implements `frontend.transcription.WordAligner`. Thread-safe; one window at a time."""

    def __init__(self, model: Model, programs: Mapping[str, Program], step_s: float) -> None:
        """`step_s`: length of an input step of the decoder, in seconds."""
        self._model = model
        self._programs = programs
        group = programs["decoder"].groups[-1]
        self._num_heads = programs["decoder"].outputs["rows"].width // group.k_width
        self._step_s = step_s
        self._lock = Lock()
        self._runnables: dict[str, Runnable] = {}
        self._kv: KvCache | None = None

    def find_times(
        self,
        encoder_input: EncoderInput,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        duration_s: float,
    ) -> list[float]:
        """Returns the time at which each token begins, and the time at which the last one ends, in
        seconds from the window's start. `duration_s`: length of the audio in the window.
        """
        with self._lock:
            kv = self._load()
            keys = self._run("encoder", kv, encoder_input, [0] * encoder_input.num_rows)
            ids = [*prompt, *token_ids]
            queries = self._run("decoder", kv, encoder_input, ids)
        weights = attention_weights(queries[len(prompt) - 1 :], keys, self._num_heads)
        steps = find_token_steps(weights, round(duration_s / self._step_s))
        return [step * self._step_s for step in steps]

    def _load(self) -> KvCache:
        if self._kv is None:
            model = self._model
            backend, dtype = build_backend(model.config), model.config.model.dtype
            for name, program in self._programs.items():
                backend.check(program, loaded_formats(model.checkpoint, dtype, None, program))
                reader = WeightReader(model.checkpoint, dtype)
                self._runnables[name] = backend.prepare_program(program, reader.load)
            groups = self._programs["encoder"].groups
            num_tokens = max(model.info.max_encoder_tokens, model.info.max_context_tokens)
            num_blocks = -(-num_tokens // BLOCK_SIZE)
            layouts = get_common_layouts(self._runnables)
            self._kv = backend.allocate(layouts, [num_blocks] * len(groups))
        return self._kv

    def _run(
        self, name: str, kv: KvCache, encoder_input: EncoderInput, token_ids: Sequence[int]
    ) -> NDArray[np.float32]:
        """Returns the rows `[T, H * D]` of a Program."""
        groups, count = self._programs[name].groups, len(token_ids)
        lens = {"encoder": encoder_input.num_rows, "cross": encoder_input.num_rows}
        context = [lens.get(group.name, count if name == "decoder" else 0) for group in groups]
        written = ("encoder", "cross") if name == "encoder" else ("decoder",)
        key_indices = np.arange(count, dtype=np.int32)
        unwritten = np.full_like(key_indices, -1)
        slots = [key_indices if group.name in written else unwritten for group in groups]
        blocks = np.arange(-(-max(*context, count) // BLOCK_SIZE), dtype=np.int32)
        batch = StepBatch(
            token_ids=np.array(token_ids, np.int32),
            key_indices=key_indices,
            positions=key_indices[None],
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array(context, np.int32)[:, None],
            slots=np.stack(slots),
            block_tables=np.tile(blocks, (len(groups), 1, 1)),
            sample_rows=key_indices,
        )
        if name == "encoder":
            rows = np.frombuffer(encoder_input.rows, "<f4").reshape(count, -1).astype(np.float32)
            batch = replace(batch, input_rows=rows, input_row_indices=key_indices)
        return self._runnables[name].run(batch, kv).arrays["rows"]
