"""`octavo serve`: opens the socket, loads the models, serves until stopped.

The socket is opened first, so that a port in use is an error before models are loaded. While models
load, and while the server drains, requests get a 503.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.api.errors import ConfigError, OctavoError
from octavo.api.pooling_params import PoolingTask
from octavo.engine.protocol.stats import EngineStats
from octavo.server.app import create_app
from octavo.server.background_jobs import BackgroundJobs
from octavo.server.http.limited_protocol import LimitedHttpProtocol
from octavo.server.http.listener import listen, remove_socket
from octavo.server.http.log_format import NOTICES, configure_logging
from octavo.server.loader import ModelLoader
from octavo.server.residency import Residency
from octavo.server.settings import ServerSettings
from octavo.server.state.adapters import LoraModule
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.key_ring import KeyRing
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.pulled_models import PulledModels
from octavo.server.state.slot import EngineSlot
from octavo.server.state.store import Store, StoreLimits, open_store

PATHS_TO_TRY: Mapping[PoolingTask, str] = {
    "embed": "/v1/embeddings",
    "classify": "/classify",
    "token_embed": "/pooling",
    "token_classify": "/pooling",
}
"""Path of an example request for a pooling model."""

MAX_MESSAGE_BYTES = 4 << 20
"""Maximum size of a WebSocket message: a minute of audio in base64."""
LAST_WORDS_S = 2.0
"""Seconds for sending the errors of aborted requests at shutdown."""

logger = logging.getLogger(__name__)
notices = logging.getLogger(NOTICES)


def serve(
    specs: Sequence[ModelSpec], settings: ServerSettings, defaults: Mapping[str, Any] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT; raises an error if every model fails to load.

    `defaults` are engine options of models that are loaded later.
    """
    configure_logging(settings)
    listener = listen(settings)
    if settings.is_open_to_all:
        _print(
            f"warning: {settings.host} is reachable from other machines without --api-key: anyone"
            f" can use this server"
        )
    pulled = PulledModels(settings.state_folder)
    own = mark_pinned(specs, settings, pulled)
    slots = [EngineSlot(spec, is_unloaded=settings.lazy_load) for spec in own]
    models = ModelDirectory(slots, settings.model_aliases())
    start = Start(models, settings, _get_port(listener))
    adapters = parse_adapters(settings, models)
    models.check_aliases(module.name for module in adapters)
    loader = ModelLoader(
        models,
        defaults=defaults,
        memory_budget=settings.memory_budget,
        adapters=adapters,
        report=_print,
        when_ready=start.note_ready,
        when_failed=start.note_failure,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        at_start = [slot for slot in models if slot.state == "loading"]
        loader.start(at_start, when_done=lambda: start.end(server.stop))
        if settings.api_key_file is not None:
            keys: KeyRing = app.state.service.keys
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
        residency: Residency = app.state.service.residency
        async with run_background_jobs(app), residency.watching(), throughput_log(models, settings):
            yield
        await asyncio.to_thread(models.close)
        if app.state.tracer is not None:
            await asyncio.to_thread(app.state.tracer.close)

    app = create_app(
        models,
        settings,
        loader=loader,
        pulled=pulled,
        lifespan=lifespan,
        store=open_configured_store(settings),
    )
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol.for_server(settings),
        ws="auto",  # none without the package websockets, which octavo[audio] installs
        ws_max_size=MAX_MESSAGE_BYTES,
        log_config=None,
        access_log=False,
        lifespan="on",
        root_path=settings.root_path,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )
    server = Server(config, models, settings)
    try:
        server.run(sockets=[listener])
    finally:
        if settings.uds is not None:
            remove_socket(settings.uds)
    if start.failure is not None:
        raise start.failure


def mark_pinned(
    specs: Sequence[ModelSpec], settings: ServerSettings, pulled: PulledModels
) -> list[ModelSpec]:
    """Marks the specs that the settings pin; raises ConfigError for an unknown name."""
    names = [*(spec.name for spec in specs), *pulled.models]
    for name in settings.pin:
        if name not in names and settings.load_on_demand != "local":
            raise ConfigError(
                f"pin: {name} is not served", hint=f"this server has {', '.join(names)}"
            )
    return [replace(spec, is_pinned=spec.is_pinned or spec.name in settings.pin) for spec in specs]


def parse_adapters(settings: ServerSettings, models: ModelDirectory) -> list[LoraModule]:
    """Parses the command line's adapters. Raises ConfigError if one has a model's name, its model
    is not served, or models load lazily.
    """
    modules = LoraModule.parse_all(settings.lora_modules)
    if modules and settings.lazy_load:
        raise ConfigError(
            "lazy_load: not supported with lora_modules, which are loaded with their model",
            hint="remove lazy_load, or load adapters with POST /v1/load_lora_adapter",
        )
    for module in modules:
        if models.answers_to(module.name):
            raise ConfigError(
                f"lora_modules: a model is also named {module.name}",
                hint="choose another name for the adapter",
            )
        if module.base_model_name is not None and models.get(module.base_model_name) is None:
            raise ConfigError(
                f"lora_modules: {module.name} is for {module.base_model_name}, which is not served",
                hint=f"this server has {', '.join(models.names)}",
            )
    return modules


def open_configured_store(settings: ServerSettings) -> Store | None:
    """Opens the configured store; None if storage is disabled."""
    folder = settings.state_folder
    if folder is None:
        return None
    return open_store(folder, StoreLimits(settings.stored_ttl_s, settings.max_stored_bytes))


@asynccontextmanager
async def run_background_jobs(app: FastAPI) -> AsyncIterator[None]:
    """Resumes stored work of an earlier server, and closes the store at the end."""
    jobs: BackgroundJobs | None = app.state.background_jobs
    store: Store | None = app.state.service.store
    if jobs is None or store is None:
        yield
        return
    await jobs.resume()
    yield
    await jobs.stop()
    await asyncio.to_thread(store.close)


@asynccontextmanager
async def throughput_log(models: ModelDirectory, settings: ServerSettings) -> AsyncIterator[None]:
    """Logs load and throughput in the background, unless the interval is 0."""
    if not settings.log_stats_interval_s:
        yield
        return
    task = asyncio.create_task(ThroughputLog(models, _print).run(settings.log_stats_interval_s))
    yield
    task.cancel()
    await task


class Start:
    """Reports the models' loading at startup, and stops the server if all fail."""

    def __init__(self, models: ModelDirectory, settings: ServerSettings, port: int) -> None:
        self.failure: Exception | None = None
        """Error to exit with: the first model's error, if all models failed."""
        self._models = models
        self._settings = settings
        self._port = port
        self._is_over = False
        self._errors: list[Exception] = []

    def note_ready(self, slot: EngineSlot) -> None:
        if self._is_over or len(self._models) > 1:
            _print(f"{slot.name} is ready")

    def note_failure(self, slot: EngineSlot, error: Exception) -> None:
        """Reports why a model failed to load; a single model's error is reported by the command."""
        self._errors.append(error)
        if self._is_over or len(self._models) > 1:
            hint = f" (hint: {error.hint})" if isinstance(error, OctavoError) and error.hint else ""
            _print(f"{slot.name} failed to load: {slot.reason}{hint}")
        if not isinstance(error, OctavoError | MemoryError):
            logger.error("%s failed to load", slot.name, exc_info=error)

    def end(self, stop: Callable[[], None]) -> None:
        """Prints the greeting when all models are ready or have failed; stops the server if none is
        ready.
        """
        self._is_over = True
        own = (slot for slot in self._models if not slot.spec.is_remote)
        ready = [slot for slot in own if slot.state in ("ready", "unloaded")]
        if ready and not self._models.is_stopping:
            _print(_greeting(ready, self._settings, self._port))
        elif self._errors and not self._models.is_stopping:
            self.failure = self._errors[0]
            stop()


class Server(uvicorn.Server):
    """uvicorn's server, which drains on a signal and exits with code 0."""

    def __init__(
        self, config: uvicorn.Config, models: ModelDirectory, settings: ServerSettings
    ) -> None:
        super().__init__(config)
        self._models = models
        self._timeout_s = settings.shutdown_timeout_s

    def stop(self) -> None:
        self._models.drain()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain; a second Ctrl-C exits immediately."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains; requests still running after the timeout fail."""
        closing = asyncio.create_task(self._close_late())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_late(self) -> None:
        """After the timeout, aborts running requests and then closes slow connections, whose own
        limits are longer than the shutdown may take.
        """
        await asyncio.sleep(self._timeout_s)
        await asyncio.to_thread(self._models.close)
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _greeting(slots: Sequence[EngineSlot], settings: ServerSettings, port: int) -> str:
    """Returns a message with models, URL and an example command."""
    url = _url(settings, port)
    names = ", ".join(slot.name for slot in slots)
    path, fields = _request_to_try(slots[0])
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if settings.has_keys else ""
    curl = (
        f"curl {_curl_options(settings)}{url}{path} -H 'Content-Type: application/json'{key} -d"
        f" {shlex.quote(json.dumps({'model': slots[0].name, **fields}))}"
    )
    return f"serving {names} on {url}\ntry: {curl}"


def _request_to_try(slot: EngineSlot) -> tuple[str, dict[str, Any]]:
    """Returns a path and body of an example request for a model."""
    has_text = not slot.spec.options.get("skip_tokenizer_init")
    pools = None if slot.loaded is None else slot.loaded.pools
    if pools is not None:
        text = "Light bends in glass." if has_text else [1, 2, 3]
        return PATHS_TO_TRY[pools], {"input": text}
    if not has_text:
        return "/v1/completions", {"prompt": [1, 2, 3]}
    question = {"role": "user", "content": "Name the capital of France."}
    return "/v1/chat/completions", {"messages": [question], "temperature": 0}


def _url(settings: ServerSettings, port: int) -> str:
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        return f"{scheme}://localhost"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _curl_options(settings: ServerSettings) -> str:
    socket_path = "" if settings.uds is None else f"--unix-socket {shlex.quote(settings.uds)} "
    return socket_path + ("" if settings.ssl_certfile is None else "--insecure ")


def _get_port(listener: socket.socket) -> int:
    """Returns the TCP port; 0 for a unix socket."""
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


def _print(text: str) -> None:
    notices.info(text)


class ThroughputLog:
    """Logs the load and throughput of each model at an interval while it has traffic."""

    def __init__(self, models: ModelDirectory, write: Callable[[str], None]) -> None:
        self._models = models
        self._write = write
        self._last: dict[str, EngineStats] = {}
        self._last_s = time.monotonic()

    async def run(self, interval_s: float) -> None:
        """Logs until it is cancelled."""
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(interval_s)
                self.log(time.monotonic())

    def log(self, now: float) -> None:
        """Writes a line for each model that computed tokens or has requests."""
        elapsed_s, self._last_s = now - self._last_s, now
        for slot in self._models:
            if slot.loaded is None:
                self._last.pop(slot.name, None)
                continue
            stats = slot.loaded.stats()
            before = self._last.get(slot.name, EngineStats())
            if stats.num_steps < before.num_steps:  # the model was loaded again
                before = EngineStats()
            self._last[slot.name] = stats
            if stats.num_steps > before.num_steps or stats.num_running or stats.num_waiting:
                self._write(f"{slot.name}: {format_load(before, stats, elapsed_s)}")


def format_load(before: EngineStats, now: EngineStats, elapsed_s: float) -> str:
    """Formats the load of an engine and its rates since `before`."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / elapsed_s
    generated = (now.generation_tokens - before.generation_tokens) / elapsed_s
    usage = now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0
    queried = now.prefix_query_tokens - before.prefix_query_tokens
    hits = now.prefix_hit_tokens - before.prefix_hit_tokens
    parts = [
        f"running {now.num_running}",
        f"waiting {now.num_waiting}",
        f"KV cache usage {usage:.1%}",
        f"prompt {prompt:.1f} tok/s",
        f"generation {generated:.1f} tok/s",
    ]
    if queried:
        parts.insert(3, f"prefix cache hit rate {hits / queried:.1%}")
    if now.num_preemptions > before.num_preemptions:
        parts.append(f"preemptions {now.num_preemptions - before.num_preemptions}")
    return ", ".join(parts)
