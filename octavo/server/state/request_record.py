"""The server's record of one HTTP request: its id, the account of its key, and its work.

Made by the outermost middleware, found in the ASGI scope; routes need not know it.
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
    """Value of the header X-Request-Id, the client's or made here."""
    owner: str = ""
    """Name of the key that was sent."""
    account: Account | None = None
    """Account of the key's limits; None where it has none."""
    is_background: bool = False
    """Whether the server asks itself, with no client waiting: then its tokens count for the key,
    and the work does not count as running.
    """
    held: list[ModelUses] = field(default_factory=list)
    """Models that stay in memory until the request has been answered."""
    outputs: list[RequestOutput] = field(default_factory=list)
    """Final outputs of the engine's work for it, for its log line and its trace."""

    def hold(self, uses: ModelUses) -> None:
        """Keeps a model in memory until `release`."""
        uses.hold()
        self.held.append(uses)

    def release(self) -> None:
        """Releases all models, once the request has been answered."""
        while self.held:
            self.held.pop().release()

    def start(self) -> None:
        """Counts work that starts; raises what the key's limits refuse."""
        if self.account is not None and self.is_background:
            self.account.check_tokens()
        elif self.account is not None:
            self.account.start()

    def charge_prompt(self, num_tokens: int) -> None:
        """Charges a prompt; raises where the key has not enough tokens left."""
        if self.account is not None:
            self.account.charge_prompt(num_tokens)

    def stop(self) -> None:
        """Counts work that `start` has counted as ended."""
        if self.account is not None and not self.is_background:
            self.account.stop()

    def charge(self, num_tokens: int) -> None:
        """Charges tokens that were generated."""
        if self.account is not None:
            self.account.charge(num_tokens)

    def end(self, output: RequestOutput) -> None:
        """Takes in the final output of one prompt, and charges what was generated."""
        self.outputs.append(output)
        if output.metrics is not None:
            self.charge(output.metrics.num_generation_tokens)


def record_of(scope: Scope) -> RequestRecord:
    """Returns the record of the request with this scope; an empty one where none was made."""
    record: RequestRecord = scope.setdefault(SCOPE_KEY, RequestRecord())
    return record
