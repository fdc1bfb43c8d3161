"""Interface of an extension that exchanges computed prompts with other engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from octavo.api.outputs import RequestOutput
from octavo.config.engine_config import EngineConfig
from octavo.engine.clients.client import EngineInfo
from octavo.engine.protocol.block_events import BlockEvent
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.frontend.input_processor import ParentRequest, RequestContext
from octavo.utils.extensions import load_classes

ComputePrompt: TypeAlias = Callable[[list[int], str, RequestContext], Awaitable[RequestOutput]]
"""Queues a prompt (token ids, cache salt) for a peer, or raises an error. The awaitable returns its
output; cancelling it aborts the prompt.
"""
ComputeHere: TypeAlias = Callable[[str], None]
"""Makes a request compute its prompt in this engine, by request id."""


class RemotePrefill:
    """Prompts computed by other engines, and for them. Used in one event loop. The default
    implementation computes every prompt here.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        *,
        compute: ComputePrompt,
        compute_here: ComputeHere,
    ) -> None: ...

    @property
    def peers(self) -> list[str]:
        """Addresses of the engines that currently compute prompts for this one."""
        return []

    def start(self) -> None:
        """Starts to listen and to connect to the peers, in the running event loop."""

    def offer_to_peers(self, request: ParentRequest) -> None:
        """Sends a request's prompt to a peer if that is faster."""

    def ended(self, request_id: str) -> None:
        """Withdraws the prompt of a request that has ended."""

    def note_step(self, step: CoreOutputs) -> None:
        """Updates the engine's cached blocks, step costs and transfer rate."""

    def note_blocks(self, events: Iterable[BlockEvent]) -> None:
        """Updates the hashes of blocks in this engine's prefix cache."""

    def close(self) -> None:
        """Closes the connections. Call it in the loop's thread, or after the loop has ended."""


def build_remote_prefill(
    config: EngineConfig, info: EngineInfo, *, compute: ComputePrompt, compute_here: ComputeHere
) -> RemotePrefill:
    """Builds the extension's RemotePrefill, or the default one without an extension."""
    kind = next(iter(load_classes("remote_prefill")), RemotePrefill)
    built: RemotePrefill = kind(config, info, compute=compute, compute_here=compute_here)
    return built
