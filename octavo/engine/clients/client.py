"""The protocol by which a frontend reaches an engine core, and the commands that cross to it.

Knows requests and outputs, and no text. Where the core runs is the implementation's business:
`in_process.py` calls it directly, `process.py` talks to a process of its own, `supervised.py`
replaces such a process when it hangs or dies, `fleet.py` has several of these.
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
    """Facts of a model that its clients may be told."""

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
    """Facts that a frontend needs of a core that has started."""

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
        """Reason why nothing is computed at the moment though the engine is to go on; "" if all is
        well.
        """
        ...

    def add(self, requests: list[EngineRequest]) -> None:
        """Hands all requests to the core, or none: raises InvalidRequest if one cannot be sent."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Ends each request that is still known with finish_reason "abort"."""
        ...

    def change(self, changes: list[RequestChange]) -> None:
        """Changes each request that is still known, between two steps."""
        ...

    def watch(self, period_s: float) -> None:
        """Has the core add a view to its outputs every `period_s` seconds while it computes; 0
        ends it.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        """Returns the outputs of the next step; blocks, without using the CPU, if there is no work.

        Returns None when the time is up or the client is closed.
        """
        ...

    def query(self, query: Query) -> QueryAnswer:
        """Returns the core's answer; raises InvalidRequest if the sender is at fault."""
        ...

    def close(self) -> None:
        """Ends the core; a `receive` that blocks returns None."""
        ...


class AddRequests(msgspec.Struct, tag=True):
    """Command: take these requests in."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag=True):
    """Command: end these requests early."""

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
    """Command: end."""


Command = AddRequests | AbortRequests | ChangeRequests | WatchEngine | RunQuery | CloseCore


def as_number(answer: QueryAnswer) -> int:
    """Returns the answer to a query for a number."""
    assert isinstance(answer, int), "this query is answered with a number"
    return answer


def as_view(answer: QueryAnswer) -> EngineView:
    """Returns the answer to ViewEngine."""
    assert isinstance(answer, EngineView), "this query is answered with a view"
    return answer
