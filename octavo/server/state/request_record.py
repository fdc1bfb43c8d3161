"""The server's record of one HTTP request: id, key usage, and engine outputs.

Created by the outermost middleware and stored in the ASGI scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Scope

from octavo.api.outputs import RequestOutput
from octavo.server.state.account import Account
from octavo.server.state.model_uses import ModelUses

SCOPE_KEY = "octavo_request_record"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request from its arrival to its last byte."""

    request_id: str = ""
    """Value of the header X-Request-Id, from the client or generated."""
    owner: str = ""
    """Name of the API key."""
    account: Account | None = None
    """None if the key has no limits."""
    is_background: bool = False
    """Whether it is an internal request. Its tokens are charged to the key, but it does not count
    as running.
    """
    held: list[ModelUses] = field(default_factory=list)
    """Models kept loaded until the response is complete."""
    outputs: list[RequestOutput] = field(default_factory=list)
    """Final outputs of its engine requests, for logs and traces."""

    def hold(self, uses: ModelUses) -> None:
        """Keeps a model loaded until `release`."""
        uses.hold()
        self.held.append(uses)

    def release(self) -> None:
        """Releases all models after the response is complete."""
        while self.held:
            self.held.pop().release()

    def start(self) -> None:
        """Counts a running request; raises an error if the key's limits are exceeded."""
        if self.account is not None and self.is_background:
            self.account.check_tokens()
        elif self.account is not None:
            self.account.start()

    def charge_prompt(self, num_tokens: int) -> None:
        """Charges a prompt; raises an error if the key has too few tokens left."""
        if self.account is not None:
            self.account.charge_prompt(num_tokens)

    def stop(self) -> None:
        """Counts the end of a request counted by `start`."""
        if self.account is not None and not self.is_background:
            self.account.stop()

    def charge(self, num_tokens: int) -> None:
        """Charges generated tokens."""
        if self.account is not None:
            self.account.charge(num_tokens)

    def end(self, output: RequestOutput) -> None:
        """Adds the final output of one prompt and charges its tokens."""
        self.outputs.append(output)
        if output.metrics is not None:
            self.charge(output.metrics.num_generation_tokens)


def get_record(scope: Scope) -> RequestRecord:
    """Returns the record of a request; an empty one if none was created."""
    record: RequestRecord = scope.setdefault(SCOPE_KEY, RequestRecord())
    return record
