"""Every error that a user of Octavo can meet.

    OctavoError
    |- ClientError            the caller's fault; carries an HTTP status
    |  |- InvalidRequest      400
    |  |- ContextTooLong      400
    |  |- Unauthorized        401
    |  |- ModelNotFound       404
    |  |- RequestNotFound     404
    |  `- Overloaded          429, with retry_after_s
    |- ServerError            our fault, or the machine's, while serving
    |  |- EngineDead          the engine process is gone
    |  |  `- PeerEngineDead   another one is gone with which it shared its experts
    |  |- OutOfBlocks         no KV block is free; the scheduler answers it by preempting
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


class OctavoError(Exception):
    """Base of all errors. `str(error)` is the message and, on a line of its own, the hint."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(kind: type[OctavoError], message: str, state: dict[str, object]) -> OctavoError:
    error = kind(message)
    error.__dict__.update(state)
    return error


MAX_SHOWN = 200
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Returns a value as messages show it: its repr, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def did_you_mean(name: str, known: Iterable[str], *, listed_in: str | None = None) -> str:
    """Returns a hint that names what an unknown name may have been meant for, or all that is
    known; `listed_in` says where these are listed if they are too many for a line.
    """
    import difflib  # takes 5 ms to import, and most programs make no mistake

    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"did you mean {close[0]}?"
    return f"{listed_in} lists what is allowed" if listed_in else f"allowed are {', '.join(names)}"


def error_named(kind: str, message: str, hint: str | None) -> OctavoError | None:
    """Returns an error that another process has told of, as its own kind; None where its class is
    not of this tree.
    """
    found = globals().get(kind)
    return (
        found(message, hint=hint)
        if isinstance(found, type) and issubclass(found, OctavoError)
        else None
    )


class ClientError(OctavoError):
    """A fault of the caller. `param` names the offending field where there is one."""

    status = 400

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class InvalidRequest(ClientError):
    """A field that is unknown, of the wrong type or out of its range."""


class ContextTooLong(ClientError):
    """A prompt that does not fit the model's context or the KV cache.

    `num_tokens` counts the prompt's tokens (at least), `max_tokens` those allowed; both are 0 if
    unknown.
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
    """No API key, or a wrong one."""

    status = 401


class ModelNotFound(ClientError):
    """A model name that this server does not serve."""

    status = 404


class RequestNotFound(ClientError):
    """A request id that is unknown, that has expired, or that another key has made."""

    status = 404


class Overloaded(ClientError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    status = 429

    def __init__(
        self, message: str, *, hint: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ServerError(OctavoError):
    """A fault of the server, or of the machine under it."""

    status = 500


class EngineDead(ServerError):
    """The engine core has ended; nothing more can be computed by it."""


class PeerEngineDead(EngineDead):
    """Another engine has ended without which this one can compute nothing."""


class OutOfBlocks(ServerError):
    """No KV block is free."""


class WorkerFailed(ServerError):
    """A step failed for this request (NaN logits, memory, a fault in a kernel)."""


class Unavailable(ServerError):
    """The server is loading its model or draining before it stops."""

    status = 503


class SetupError(OctavoError):
    """A reason why an engine cannot start. The CLI prints it and exits with 2."""


class ConfigError(SetupError):
    """An option that is unknown, out of its range, or at odds with another."""


class InsufficientMemory(ConfigError):
    """A model that needs more memory than is free."""


class BackendUnavailable(SetupError):
    """The backend is not installed, not supported here, or cannot run an op of this Program."""


class UnsupportedModel(SetupError):
    """A model family, tensor format or option of a model that Octavo does not know."""


class WeightMismatch(SetupError):
    """A checkpoint that is corrupt, truncated, incomplete, or of other shapes than its config
    says."""


class DownloadFailed(SetupError):
    """A model that could not be fetched, or that is not the file its checksum names."""

    status = 502


class NotOnHub(DownloadFailed):
    """A model that the hub does not have."""

    status = 404


class GatedModel(DownloadFailed):
    """A model that the hub gives only to users who accepted its terms, or who may read it."""

    status = 403


class DiskFull(DownloadFailed):
    """A model for which the disk, or the user's quota, has no room."""

    status = 507


DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Codes of an OSError that mean that there is no room."""
