"""Protocol between a frontend and an engine core, and the commands that it sends.

Requests and outputs contain token ids, no text. Implementations: `in_process.py` calls the core
directly, `process.py` runs it in a separate process, `supervised.py` replaces that process if it
hangs or dies, and `fleet.py` distributes requests over several cores.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from octavo.engine.protocol.kv_messages import TransferFacts
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import EngineRequest, Query, QueryAnswer, RequestChange
from octavo.engine.protocol.view import EngineView


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about the model that clients may see."""

    family: str = ""
    """Hugging Face's model_type."""
    num_parameters: int = 0
    weight_format: str = ""
    """Quantization format of the model's files, as `octavo list` shows it. If the files name none,
    or the weights are quantized while loading: the format of most weights.
    """
    num_bytes: int = 0
    """Size of the weight files, in bytes."""
    file_format: str = ""
    """Format of the model's files: gguf or safetensors."""


class EngineInfo(msgspec.Struct):
    """Facts about a started core that the frontend needs."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    description: str
    """Line printed at the start that says how many requests fit."""
    kv_bytes: int = 0
    """Host memory that the KV cache may use, in bytes; 0 on a device with its own memory."""
    model: ModelFacts = ModelFacts()
    transfer: TransferFacts | None = None
    """Properties that must match those of engines from which it fetches blocks; None if it fetches
    none.
    """
    original: OriginalContext = ONE_CONTEXT
    """Original context of a LongRoPE model."""
    cache_facts: dict[str, str] = {}
    """Everything that the bytes of stored blocks depend on, by name; {} without `prefix_cache_dir`.
    """


class EngineClient(Protocol):
    """A frontend's client of one engine. One thread calls `receive`, any thread the other methods.

    Every request that `add` accepts ends in exactly one output with a finish_reason, unless
    `receive` raises EngineDead.
    """

    info: EngineInfo

    @property
    def trouble(self) -> str:
        """Reason why nothing is computed while the engine recovers; "" if it is healthy."""
        ...

    def add(self, requests: list[EngineRequest]) -> None:
        """Sends all requests to the core, or none: raises InvalidRequest if one of them cannot be
        sent.
        """
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Ends each request that is still running or waiting, with finish_reason "abort"; ignores
        others.
        """
        ...

    def change(self, changes: list[RequestChange]) -> None:
        """Changes each request that is still running or waiting, between two steps; ignores
        others.
        """
        ...

    def watch(self, period_s: float) -> None:
        """Makes the core add an EngineView to its outputs every `period_s` seconds while it
        computes; 0 stops it.
        """
        ...

    def hold(self, *, holds: bool) -> None:
        """Makes the core compute no further steps, or continue. Requests are accepted and aborted
        as usual.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        """Returns the outputs of the next step; blocks without using the CPU if there is no work.

        Returns None after a timeout or if the client is closed.
        """
        ...

    def query(self, query: Query) -> QueryAnswer:
        """Returns the core's reply; raises InvalidRequest if the query is invalid."""
        ...

    def close(self) -> None:
        """Ends the core; a `receive` that blocks returns None."""
        ...


class AddRequests(msgspec.Struct, tag=True):
    """Command: add these requests."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag=True):
    """Command: abort these requests."""

    request_ids: list[str]


class ChangeRequests(msgspec.Struct, tag=True):
    """Command: change these requests while they wait or run."""

    changes: list[RequestChange]


class WatchEngine(msgspec.Struct, tag=True):
    """Command: add views of the engine to the outputs."""

    period_s: float
    """Minimum seconds between two views; 0: no views."""


class HoldEngine(msgspec.Struct, tag=True):
    """Command: compute no further steps, or continue."""

    holds: bool


class RunQuery(msgspec.Struct, tag=True):
    """Command: answer a query with a reply that carries the same number."""

    number: int
    query: Query


class CloseCore(msgspec.Struct, tag=True):
    """Command: shut down."""


Command = (
    AddRequests | AbortRequests | ChangeRequests | WatchEngine | HoldEngine | RunQuery | CloseCore
)


def as_number(answer: QueryAnswer) -> int:
    """Returns the reply to a query whose result is a number."""
    assert isinstance(answer, int), "this query is answered with a number"
    return answer


def as_view(answer: QueryAnswer) -> EngineView:
    """Returns the reply to ViewEngine."""
    assert isinstance(answer, EngineView), "this query is answered with a view"
    return answer
