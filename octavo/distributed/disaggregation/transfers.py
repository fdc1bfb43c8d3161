"""Both directions of prefill/decode disaggregation for one engine."""

from __future__ import annotations

import time
from collections.abc import Iterable

from octavo.config.engine_config import EngineConfig
from octavo.distributed.disaggregation.prefill_service import PrefillService
from octavo.distributed.disaggregation.remote_prefill import PrefillPeers
from octavo.distributed.options import TransferOptions
from octavo.engine.clients.client import EngineInfo
from octavo.engine.protocol.block_events import BlockEvent
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.remote_prefill import ComputeHere, ComputePrompt, RemotePrefill


class Transfers(RemotePrefill):
    """Contains `PrefillPeers` if prefill_peer is set, and a `PrefillService` for the roles prefill
    and both.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        *,
        compute: ComputePrompt,
        compute_here: ComputeHere,
    ) -> None:
        options, facts = config.of(TransferOptions), info.transfer
        self._peers: PrefillPeers | None = None
        self._service: PrefillService | None = None
        if facts is not None and options.prefill_peer:
            max_chunk = config.scheduler.max_num_batched_tokens
            self._peers = PrefillPeers(options, facts, compute_here, max_chunk)
        if facts is not None and options.prefills_for_peers:
            self._service = PrefillService(options, facts, compute)

    def start(self) -> None:
        if self._service is not None:
            self._service.start()
        if self._peers is not None:
            self._peers.start()

    @property
    def peers(self) -> list[str]:
        return [] if self._peers is None else self._peers.there

    def offer_to_peers(self, request: ParentRequest) -> None:
        if self._peers is not None:
            self._peers.offer_to_peers(request)

    def ended(self, request_id: str) -> None:
        if self._peers is not None:
            self._peers.withdraw(request_id)

    def note_step(self, step: CoreOutputs) -> None:
        self.note_blocks(step.block_events)
        if self._peers is not None:
            stored = step.stats.connector.stored
            self._peers.sending_point.note(step.costs, stored, time.monotonic())

    def note_blocks(self, events: Iterable[BlockEvent]) -> None:
        if self._peers is not None:
            self._peers.note_blocks(events)

    def close(self) -> None:
        for part in (self._service, self._peers):
            if part is not None:
                part.close()
