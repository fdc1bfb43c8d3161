"""Protocol between a frontend and an engine core, and the commands that it sends.

Knows requests and outputs, not text. Implementations: `in_process.py` calls the core directly,
`process.py` runs it in a process of its own, `supervised.py` replaces that process if it hangs or
dies, and `fleet.py` distributes requests over several cores.
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
    """Quantization of its files, as `octavo list` shows it; if they do not name one or it is made
    at load, the format of most of its weights."""
    num_bytes: int = 0
    """Size of its weights' files."""
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
    """Memory of the machine that the KV cache may take, in bytes; 0 on a device with its own."""
    model: ModelFacts = ModelFacts()
    transfer: TransferFacts | None = None
    """Facts that are compared with engines of which it fetches blocks; None if it does not."""
    original: OriginalContext = ONE_CONTEXT
    """Context of the model before its longer angles."""


class EngineClient(Protocol):
    """A frontend's client of one engine. One thread calls `receive`, any thread the other methods.

    Every request that `add` accepts ends in exactly one output with a finish_reason, unless
    `receive` raises EngineDead.
    """

    info: EngineInfo

    @property
    def trouble(self) -> str:
        """Reason why nothing is computed at the moment, although the engine will recover; "" if it
        is healthy.
        """
        ...

    def add(self, requests: list[EngineRequest]) -> None:
        """Sends all requests to the core, or none: raises InvalidRequest if one cannot be sent."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Ends each request that is still known with finish_reason "abort"."""
        ...

    def change(self, changes: list[RequestChange]) -> None:
        """Changes each request that is still known, between two steps."""
        ...

    def watch(self, period_s: float) -> None:
        """Makes the core add a view to its outputs every `period_s` seconds while it computes; 0
        stops it.
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
    """Command: add views to the outputs."""

    period_s: float
    """Least seconds between two of them; 0 for none."""


class RunQuery(msgspec.Struct, tag=True):
    """Command: answer a query with a reply that carries the same number."""

    number: int
    query: Query


class CloseCore(msgspec.Struct, tag=True):
    """Command: shut down."""


Command = AddRequests | AbortRequests | ChangeRequests | WatchEngine | RunQuery | CloseCore


def as_number(answer: QueryAnswer) -> int:
    """Returns the reply to a query whose result is a number."""
    assert isinstance(answer, int), "this query is answered with a number"
    return answer


def as_view(answer: QueryAnswer) -> EngineView:
    """Returns the reply to ViewEngine."""
    assert isinstance(answer, EngineView), "this query is answered with a view"
    return answer
