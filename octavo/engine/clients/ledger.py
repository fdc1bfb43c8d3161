"""Records the unfinished requests and their outputs so far, so that a new core can resume them.

Owned by `supervised.py`, whose lock protects it against concurrent adds and aborts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.requests import EngineRequest, RequestChange
from octavo.engine.protocol.stats import COUNTS, EngineStats


@dataclass(slots=True)
class UnfinishedRequest:
    """A request and its output so far."""

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    mirostat_mu: float | None = None
    """Mirostat's mu after `token_ids`."""
    aborted: bool = False

    def add_output(self, output: EngineOutput) -> None:
        """Records the outputs of a step."""
        self.token_ids += output.token_ids
        if output.mirostat_mu is not None:
            self.mirostat_mu = output.mirostat_mu

    def resumed(self, *, one_token: bool = False) -> EngineRequest:
        """Returns the request in the form in which a new core resumes it."""
        fields: dict[str, Any] = {}
        if self.token_ids:
            fields = {"output_token_ids": list(self.token_ids), "fork_of": None}
            fields["mirostat_mu"] = self.mirostat_mu
        return msgspec.structs.replace(self.request, resumed=True, one_token=one_token, **fields)


class RequestLedger:
    """All unfinished requests by id, and the number of requests ever sent."""

    def __init__(self) -> None:
        self.unfinished: dict[str, UnfinishedRequest] = {}
        self._num_sent = self._num_sent_tokens = 0

    def add(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            self.unfinished[request.request_id] = UnfinishedRequest(request)
            self._num_sent += 1
            self._num_sent_tokens += len(request.prompt_token_ids)

    def give_up(self, request_id: str) -> EngineRequest:
        """Removes an unfinished request as if it had never been sent. Returns it in the form in
        which another core resumes it.
        """
        unfinished = self.unfinished.pop(request_id)
        self._num_sent -= 1
        self._num_sent_tokens -= len(unfinished.request.prompt_token_ids)
        return msgspec.structs.replace(unfinished.resumed(), fork_of=None)

    def change(self, changes: Iterable[RequestChange]) -> None:
        """Records changes of unfinished requests, so that a core that resumes them applies the
        changes.
        """
        for change in changes:
            unfinished = self.unfinished.get(change.request_id)
            if unfinished is not None:
                unfinished.request = msgspec.structs.replace(
                    unfinished.request, params=change.params, priority=change.priority
                )

    def known(self, request_ids: Iterable[str]) -> list[str]:
        return [name for name in request_ids if name in self.unfinished]

    def aborted(self) -> list[str]:
        return [name for name, request in self.unfinished.items() if request.aborted]

    def counts(self, stats: EngineStats) -> EngineStats:
        """Returns the counts of `stats` without the unfinished requests, which the next core counts
        again when it resumes them.
        """
        tokens = sum(len(one.request.prompt_token_ids) for one in self.unfinished.values())
        added = {
            "num_added": self._num_sent - len(self.unfinished),
            "num_added_tokens": self._num_sent_tokens - tokens,
        }
        return EngineStats(**{name: getattr(stats, name) for name in COUNTS} | added)
