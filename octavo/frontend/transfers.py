"""An engine's exchange of computed prompts with others: what it has computed elsewhere, and what it
computes for them.

Belongs to one event loop. Its parts are `prefill_peers.py` and `prefill_service.py`; an engine
without kv_transfer has neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from octavo.config.cache_options import TransferOptions
from octavo.engine.protocol.block_events import BlockEvent
from octavo.engine.protocol.kv_messages import StoredBytes
from octavo.engine.protocol.step_costs import StepCosts
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.prefill_service import ComputePrompt, PrefillService
from octavo.frontend.remote_prefill import ComputeHere, PrefillPeers
from octavo.transfer.messages import TransferFacts


class Transfers:
    """Both directions of one engine."""

    def __init__(
        self,
        options: TransferOptions,
        facts: TransferFacts | None,
        *,
        compute: ComputePrompt,
        compute_here: ComputeHere,
        max_chunk: int,
    ) -> None:
        """Takes what computes a prompt for others, what has a request compute its own, and the most
        tokens of a step here.
        """
        self._peers: PrefillPeers | None = None
        self._service: PrefillService | None = None
        if facts is not None and options.prefill_peer:
            self._peers = PrefillPeers(options, facts, compute_here, max_chunk)
        if facts is not None and options.computes_for_others:
            self._service = PrefillService(options, facts, compute)

    def start(self) -> None:
        """Begins to listen and to meet the peers, in the running event loop."""
        if self._service is not None:
            self._service.start()
        if self._peers is not None:
            self._peers.start()

    @property
    def peers(self) -> list[str]:
        """Addresses of the engines that compute prompts for this one now."""
        return [] if self._peers is None else self._peers.there

    def place(self, request: ParentRequest) -> None:
        """Has another engine compute a request's prompt, where that is to be."""
        if self._peers is not None:
            self._peers.place(request)

    def ended(self, request_id: str) -> None:
        """Records that a request has ended: nothing is to be computed for it any more."""
        if self._peers is not None:
            self._peers.withdraw(request_id)

    def note_blocks(self, events: Iterable[BlockEvent]) -> None:
        """Takes in what the engine's own prefix cache has gained and lost."""
        if self._peers is not None:
            self._peers.note_blocks(events)

    def note_rates(self, costs: StepCosts | None, stored: StoredBytes) -> None:
        """Takes in what the engine's steps cost, and how fast blocks come from others."""
        if self._peers is not None:
            self._peers.sending_point.note(costs, stored, time.monotonic())

    def close(self) -> None:
        """Ends both directions; to be called in the loop's thread, or once the loop is over."""
        for part in (self._service, self._peers):
            if part is not None:
                part.close()
