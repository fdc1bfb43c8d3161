"""Messages between the core's process and the frontend, besides the commands in `client.py`.

All are msgpack over ZeroMQ. The frontend sends a CoreSetup, then commands; the core replies.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest
from octavo.engine.clients.client import AddRequests, Command, EngineInfo
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import EngineRequest, QueryAnswer
from octavo.utils.child_process import ChildFailed


class CoreSetup(msgspec.Struct):
    """The first message to the process."""

    build: str
    """Name of a `core_process.BuildCore`, "module:function"."""
    options: dict[str, Any]
    """Engine options by their flat names."""
    endpoint_numbers: list[int] = []
    """Command-line arguments of the engine's rank among the engines that share experts; [] if
    experts are not shared.
    """


class Connected(msgspec.Struct, tag=True):
    """The first reply: both sockets are open, and the endpoints' files are no longer needed."""


class LoadProgress(msgspec.Struct, tag=True):
    """A line of loading progress."""

    text: str


class CoreReady(msgspec.Struct, tag=True):
    """The model is loaded and the core accepts requests."""

    info: EngineInfo


class Stepped(msgspec.Struct, tag=True):
    """Outputs of a step, or part of them."""

    outputs: CoreOutputs


class QueryResult(msgspec.Struct, tag=True):
    """The reply to the RunQuery of the same number."""

    number: int
    value: QueryAnswer = 0
    error: str | None = None
    """Message of the InvalidRequest that was raised instead of returning a value; None on success.
    """
    hint: str | None = None


Reply = Connected | LoadProgress | CoreReady | ChildFailed | Stepped | QueryResult


class ExecutorLost(msgspec.Struct, tag=True):
    """Sent by another thread of the core's process to its main loop: the executor has ended."""

    error: ChildFailed


class CalledToStep(msgspec.Struct, tag=True):
    """Sent by another thread of the core's process to its main loop: another engine has begun a
    step that this one must also compute.
    """


_decoder = msgspec.msgpack.Decoder(Command)


def encode_requests(requests: list[EngineRequest]) -> bytes:
    """Returns the encoded AddRequests command.

    Raises InvalidRequest if a value does not fit the wire format, such as an integer of more than
    64 bits. As a check, the encoded fields are decoded again (except the prompt's token ids, which
    are already validated), since a core that cannot decode a request would exit.
    """
    try:
        data = msgspec.msgpack.encode(AddRequests(requests))
        fields = [msgspec.structs.replace(one, prompt_token_ids=[]) for one in requests]
        _decoder.decode(msgspec.msgpack.encode(AddRequests(fields)))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the request cannot be sent to the engine: {error}",
            hint="integers must fit in 64 bits, and each field must have its declared type",
        ) from error
    return data
