"""Every error that a user of Octavo can meet.

    OctavoError
    |- ClientError            the caller's fault; carries an HTTP status
    |  |- InvalidRequest      400
    |  |- ContextTooLong      400
    |  |- Unauthorized        401
    |  |- ModelNotFound       404
    |  |- RequestNotFound     404
    |  |- SessionNotFound     404
    |  `- Overloaded          429, with retry_after_s
    |- ServerError            our fault, or the machine's, while serving
    |  |- EngineDead          the engine process is gone
    |  |  `- PeerEngineDead   another one is gone with which it shared its experts
    |  |- WorkerFailed        a step failed for one request
    |  `- Unavailable         loading or draining; HTTP 503
    `- SetupError             before anything is served; the CLI prints it and exits with 2
       |- ConfigError         an option's value, or two options together
       |  `- InsufficientMemory  a model that does not fit the memory
       |- BackendUnavailable  the chosen backend cannot run here, or cannot run this Program
       |- UnsupportedModel    a family, op or format that is not known
       |- WeightMismatch      a checkpoint that is corrupt, truncated or of other shapes
       `- DownloadFailed      502: a model that could not be fetched, or whose checksum is wrong
          `- NotOnHub         404: a model that the hub does not have

A message says what was wrong, what was got and what is allowed; `hint` says what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import ClassVar


class OctavoError(Exception):
    """Base class of all errors; `str(error)` is the message, then the hint on its own line."""

    default_hint: ClassVar[str | None] = None
    """Hint of errors that are raised without one."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(kind: type[OctavoError], message: str, state: dict[str, object]) -> OctavoError:
    error = kind(message)
    error.__dict__.update(state)
    return error


MAX_SHOWN = 200
"""Maximum length of a value in an error message, in characters."""


def shown(value: object) -> str:
    """Returns the repr of a value for an error message, truncated if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def did_you_mean(name: str, known: Iterable[str], *, listed_in: str | None = None) -> str:
    """Returns a hint with the closest known name, or with all known names. If there are too many,
    the hint refers to `listed_in`.
    """
    import difflib  # takes 5 ms to import, and most programs make no mistake

    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"did you mean {close[0]}?"
    return f"see {listed_in}" if listed_in else f"expected {', '.join(names)}"


def make_error(kind: str, message: str, hint: str | None) -> OctavoError | None:
    """Recreates an error received from another process by its class name; None if the class is not
    defined here.
    """
    error_class = globals().get(kind)
    return (
        error_class(message, hint=hint)
        if isinstance(error_class, type) and issubclass(error_class, OctavoError)
        else None
    )


class ClientError(OctavoError):
    """An error caused by the caller. `param` names the invalid field, if any."""

    status = 400

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class InvalidRequest(ClientError):
    """A field that is unknown, of the wrong type or out of range."""


class ContextTooLong(ClientError):
    """A prompt longer than the model's context or the KV cache.

    `num_tokens` is the length of the prompt (a lower bound), `max_tokens` the allowed length; both
    are 0 if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        num_tokens: int = 0,
        max_tokens: int = 0,
    ) -> None:
        super().__init__(message, hint=hint, param=param)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Unauthorized(ClientError):
    """A missing or invalid API key."""

    status = 401


class ModelNotFound(ClientError):
    """The server has no model of this name."""

    status = 404


class RequestNotFound(ClientError):
    """A request id that is unknown, expired, or that belongs to another API key."""

    status = 404


class SessionNotFound(ClientError):
    """No session of this name is stored."""

    status = 404


class Overloaded(ClientError):
    """The waiting queue is full; retry after `retry_after_s` seconds."""

    status = 429

    def __init__(
        self, message: str, *, hint: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ServerError(OctavoError):
    """An error of the server or its machine."""

    status = 500


class EngineDead(ServerError):
    """The engine core has ended and computes nothing more."""


class PeerEngineDead(EngineDead):
    """Another engine has ended that this one depends on (expert parallelism)."""


class WorkerFailed(ServerError):
    """A step failed for this request (NaN logits, out of memory, a kernel error)."""


class Unavailable(ServerError):
    """The server is loading its model or draining before shutdown."""

    status = 503
    default_hint = "try again in a few seconds"


class SetupError(OctavoError):
    """An error before serving starts. The CLI prints it and exits with 2."""


class ConfigError(SetupError):
    """An option that is unknown, out of range, or in conflict with another."""


class InsufficientMemory(ConfigError):
    """The model needs more memory than is free."""


class BackendUnavailable(SetupError):
    """The backend is not installed, not supported here, or lacks an op of this Program."""


class UnsupportedModel(SetupError):
    """A model family, tensor format or model option that is not supported."""

    default_hint = (
        "if the files are as published, this variant is not supported; octavo models lists the"
        " supported families"
    )


class WeightMismatch(SetupError):
    """A corrupt, truncated or incomplete checkpoint, or shapes that contradict its config."""

    default_hint = (
        "the files may be damaged, incomplete or of different models; download them again"
    )


class DownloadFailed(SetupError):
    """A model that could not be downloaded, or whose checksum does not match."""

    status = 502


class NotOnHub(DownloadFailed):
    """A model that does not exist on the hub."""

    status = 404


class GatedModel(DownloadFailed):
    """A model whose terms the user has not accepted on the hub, or that is private."""

    status = 403


class DiskFull(DownloadFailed):
    """No space left on the disk or in the user's quota for a model."""

    status = 507


DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno values that mean that the disk is full."""
