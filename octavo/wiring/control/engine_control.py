"""Pauses, unloads and updates a running engine, for training loops. Methods have vLLM's names.

An update writes the new model to a directory and replaces the engine process by one that loads it,
with the mechanism that also replaces a process that has died. Unfinished requests wait and then
continue on the new weights. Nothing of the old process remains, so the engine is the one that a
fresh start with these weights gives, bit for bit, in every weight format and parallel layout.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from octavo.api.errors import InvalidRequest, ServerError
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.requests import ResetPrefixCache, ViewEngine
from octavo.frontend.frontend import Frontend
from octavo.wiring.control.updates import check_files, check_updated, write_update

PauseMode = Literal["abort", "wait", "keep"]
POLL_S = 0.02


@runtime_checkable
class RestartableClient(Protocol):
    """Client whose core processes can be ended and replaced on purpose. `supervised.py` and
    `fleet.py` implement it.
    """

    def stop(self) -> None: ...

    def restart(self, changes: Mapping[str, Any]) -> None: ...

    @property
    def num_failed_starts(self) -> int: ...

    @property
    def is_restarting(self) -> bool: ...

    @property
    def trouble(self) -> str: ...


class EngineControl:
    """Pause, sleep and weight updates of one engine, one at a time."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._lock = asyncio.Lock()
        self.is_paused = False
        self.is_sleeping = False
        self.weight_version = "default"
        """Name of the weights, set by the trainer; "default" before the first update."""
        self._model = frontend.config.model.model
        """Path or name of the model whose weights the engine has."""
        self._written: tempfile.TemporaryDirectory[str] | None = None
        """Directory of `_model` after an update."""
        self._received: tempfile.TemporaryDirectory[str] | None = None
        """Directory of `make_update_file`."""
        self._files: list[Path] = []
        """Files that are not applied yet."""
        self._has_started = False
        """Whether an update in several parts has started."""

    # -- pause -------------------------------------------------------------------------------------

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True
    ) -> None:
        """Computes no further steps until `resume_generation`. New requests are accepted and wait.

        `mode` decides about the unfinished requests: "abort" ends them, "wait" lets those that
        exist now finish first, "keep" holds them. `clear_cache` clears the prefix cache unless
        requests are held.
        """
        self._check_alone("pausing")
        async with self._lock:
            await self._pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Computes the held and the new requests."""
        async with self._lock:
            if self.is_sleeping:
                raise InvalidRequest("the engine sleeps", hint="wake it up with POST /wake_up")
            self._resume()

    def _resume(self) -> None:
        self._frontend.client.hold(holds=False)
        self.is_paused = False

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        names = [state.request.request_id for state in self._frontend.outputs.unfinished()]
        client = self._frontend.client
        if mode == "abort":
            for name in names:
                self._frontend.abort(name)
        if mode != "keep":
            while any(map(self._frontend.outputs.unfinished_ids, names)):
                await asyncio.sleep(POLL_S)
        client.hold(holds=True)
        self.is_paused = True
        if self.is_sleeping or client.trouble:
            return
        await asyncio.to_thread(client.query, ViewEngine(with_blocks=False))  # waits for the hold
        if clear_cache:
            await asyncio.to_thread(client.query, ResetPrefixCache())

    # -- sleep -------------------------------------------------------------------------------------

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses the engine and ends its process, which frees the memory of weights and KV cache.
        Both of vLLM's levels do this. Requests that `mode` keeps wait for `wake_up`.
        """
        if level not in (0, 1, 2):
            raise InvalidRequest(f"level: got {level}, expected 0, 1 or 2", param="level")
        client = self._restartable()
        async with self._lock:
            await self._pause(mode, clear_cache=True)
            if level:
                self.is_sleeping = True
                client.stop()

    async def wake_up(self) -> None:
        """Loads the model again, with the latest weights, and resumes."""
        async with self._lock:
            if self.is_sleeping:
                await self._restart(self._model)
                self.is_sleeping = False
            self._resume()

    # -- weights -----------------------------------------------------------------------------------

    async def start_weight_update(self) -> None:
        """Begins an update in several parts, which `finish_weight_update` applies together."""
        await asyncio.to_thread(self._check_updatable)
        async with self._lock:
            self._drop_files()
            self._has_started = True

    def make_update_file(self) -> Path:
        """Returns the path of a new file for the tensors of an update, in safetensors format. Pass
        it to `update_weights`, which deletes it once it is applied.
        """
        folder = self._received or tempfile.TemporaryDirectory(prefix="octavo-update-")
        self._received = folder
        descriptor, path = tempfile.mkstemp(suffix=".safetensors", dir=folder.name)
        os.close(descriptor)
        return Path(path)

    async def update_weights(self, file: Path) -> None:
        """Replaces tensors of the model by those of a safetensors file, which have the names and
        shapes of the model's own files. After `start_weight_update`, it is applied only by
        `finish_weight_update`.

        A tensor keeps its type if the option `dtype` is set, else it is converted to the type of
        the one that it replaces. Raises InvalidRequest for a file that does not fit the model, and
        then changes nothing.
        """
        await asyncio.to_thread(self._check_updatable)
        async with self._lock:
            self._files.append(file)
            if not self._has_started:
                await self._apply()

    async def update_from_model(self, path: str) -> None:
        """Replaces all weights by those of another model with the same configuration."""
        async with self._lock:
            self._check_receives_no_blocks()
            await self._switch(path)
            self._drop_written()

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Applies all parts of an update."""
        async with self._lock:
            if self._files:
                await self._apply()
            self._has_started = False
            self.weight_version = weight_version or self.weight_version

    def close(self) -> None:
        received, self._received = self._received, None
        if received is not None:
            received.cleanup()
        self._drop_written()

    async def _apply(self) -> None:
        """Writes the updated model and switches to it."""
        written = tempfile.TemporaryDirectory(prefix="octavo-weights-")
        try:
            await asyncio.to_thread(
                write_update, self._config(self._model), self._files, Path(written.name)
            )
            await self._switch(written.name)
        except BaseException:
            written.cleanup()
            raise
        finally:
            self._drop_files()
        self._drop_written()
        self._written = written

    async def _switch(self, path: str) -> None:
        """Makes the engine one of the model at `path`; at the next `wake_up` if it sleeps."""
        self._restartable()
        await asyncio.to_thread(check_updated, self._frontend.config, self._config(path))
        if not self.is_sleeping:
            await self._restart(path)
        self._model = path

    async def _restart(self, path: str) -> None:
        """Replaces the engine process by one that loads the model at `path`. If it cannot, the
        process is started with the previous model, and its error raised.
        """
        client = self._restartable()
        client.restart({"model": path})
        while client.is_restarting:
            if client.num_failed_starts:
                trouble = client.trouble
                client.restart({"model": self._model})
                raise ServerError(f"the new weights cannot be loaded: {trouble}")
            await asyncio.sleep(POLL_S)

    def _config(self, path: str) -> EngineConfig:
        config = self._frontend.config
        return replace(config, model=replace(config.model, model=path))

    def _restartable(self) -> RestartableClient:
        client = self._frontend.client
        if not isinstance(client, RestartableClient):
            raise InvalidRequest(
                "this engine runs in the process of its caller, which cannot be restarted",
                hint="use octavo serve, or AsyncLLM without in_process",
            )
        self._check_alone("restarting")
        return client

    def _check_alone(self, what: str) -> None:
        if self._frontend.config.fleet.num_expert_engines > 1:
            raise InvalidRequest(
                f"{what} one of several engines that share experts is not supported",
                hint="serve the model without enable_expert_parallel over engines",
            )

    def _check_updatable(self) -> None:
        self._check_receives_no_blocks()
        check_files(self._config(self._model))

    def _check_receives_no_blocks(self) -> None:
        self._restartable()
        if self._frontend.info.transfer is not None:
            raise InvalidRequest(
                "the weights of an engine that receives KV blocks of others cannot be updated",
                hint="update the weights of an engine that serves alone",
            )

    def _drop_files(self) -> None:
        """Ends an update: deletes its received files."""
        files, self._files = self._files, []
        self._has_started = False
        for file in files:
            if self._received is not None and file.parent == Path(self._received.name):
                file.unlink(missing_ok=True)

    def _drop_written(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.cleanup()
