"""Remote prefill: manages the engines that compute long prompts for this one, and computes the
prompt length from which this is faster.

A prompt is sent to a peer when its request is submitted; the worker then fetches the blocks from
the peer, by block hash. If a peer declines, fails or is lost, the prompt is computed here. A prompt
is sent if computing it here takes longer than transferring its blocks. Used by one event loop.
Source: DistServe (Zhong et al. 2024).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from octavo.api.sampling_params import SamplingParams
from octavo.distributed.options import TransferOptions
from octavo.distributed.transfer.address import endpoint, parse_address, split_endpoints
from octavo.distributed.transfer.messages import (
    UNREADABLE,
    Accepted,
    Declined,
    FrontReplyMessage,
    FrontRequestMessage,
    Hello,
    Prefill,
    Welcome,
    Withdrawn,
)
from octavo.engine.protocol.block_events import BlockEvent
from octavo.engine.protocol.block_hashes import BlockHashing, note_events
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.protocol.kv_messages import StoredBytes, TransferFacts
from octavo.engine.protocol.step_costs import UNMEASURED, StepCosts
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.remote_prefill import ComputeHere
from octavo.utils.secure_sockets import lock_client

logger = logging.getLogger(__name__)

MAX_PROMPTS = 256
"""Maximum number of prompts that one peer computes at once; further prompts are computed here."""

REACH_S = 10.0
"""Seconds after which an unreachable peer is logged; connecting is retried indefinitely."""


@dataclass(slots=True)
class PrefillPeer:
    """An engine that computes prompts for this one."""

    address: str
    socket: zmq.asyncio.Socket
    endpoint: str = ""
    """Endpoints of its ranks' blocks (`address.join_endpoints`); "" while it is not connected, or
    if its blocks have a different layout.
    """
    tokens: dict[str, int] = field(default_factory=dict)
    """Number of tokens of the prompts that it computes, by request id."""
    was_reached: bool = False
    """Whether it has ever answered."""
    asked: dict[str, float] = field(default_factory=dict)
    """Send time of each prompt that it has not answered yet."""

    @property
    def load(self) -> int:
        return sum(self.tokens.values())


class PrefillPeers:
    """Chooses the peer for a prompt, and tracks which peers are available."""

    def __init__(
        self,
        options: TransferOptions,
        facts: TransferFacts,
        compute_here: ComputeHere,
        max_chunk: int,
    ) -> None:
        """`max_chunk`: maximum number of tokens in a step of this engine."""
        self._options = options
        self._facts = facts
        self._compute_here = compute_here
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._peers: list[PrefillPeer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._replies = msgspec.msgpack.Decoder(FrontReplyMessage)
        self._cached = CachedHashes()
        """Hashes of the blocks in this engine's own prefix cache."""
        self.sending_point = RemotePrefillThreshold(
            options.kv_transfer_min_tokens,
            token_bytes=facts.token_bytes,
            max_chunk=max_chunk,
        )
        """Minimum number of uncached tokens for which a prompt is sent to a peer."""

    def start(self) -> None:
        """Starts to connect to the peers, in the running event loop; peers may disconnect and
        return.
        """
        if self._tasks:
            return
        for address in self._options.prefill_peer:
            socket = self._context.socket(zmq.DEALER)
            lock_client(socket, self._options.kv_transfer_secret)
            peer = PrefillPeer(address, socket)
            self._peers.append(peer)
            self._tasks += [
                asyncio.create_task(self._watch(peer)),
                asyncio.create_task(self._listen(peer)),
                asyncio.create_task(self._tell_absence(peer)),
            ]

    @property
    def there(self) -> list[str]:
        """Addresses of the peers that accept prompts now."""
        return [peer.address for peer in self._peers if peer.endpoint]

    def close(self) -> None:
        """Disconnects from the peers; call it in the loop's thread, or after the loop has ended."""
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        self._tasks.clear()
        self._context.destroy(linger=0)

    # -- prompts -----------------------------------------------------------------------------------

    def note_blocks(self, events: Iterable[BlockEvent]) -> None:
        """Applies the block events of this engine's prefix cache."""
        note_events(self._cached, events)

    def withdraw(self, request_id: str) -> None:
        """Tells the peer that computes a request's prompt that the request has ended."""
        for peer in self._peers:
            peer.asked.pop(request_id, None)
            if peer.tokens.pop(request_id, None) is not None:
                self._send(peer, Withdrawn(request_id))

    def offer_to_peers(self, request: ParentRequest) -> None:
        """Sends a request's prompt to the peer with the fewest queued tokens, if enough of the
        prompt is uncached here and a peer is available.
        """
        first, num_tokens = request.samples[0], len(request.prompt_token_ids)
        is_own = bool(
            first.sends_kv
            or first.fork_of is not None
            or first.adapter is not None  # whose files the peer may not have
            or first.media  # whose pixels it would need
            or not isinstance(request.params, SamplingParams)
        )
        now = time.monotonic()
        fewest = self.sending_point.num_tokens(now)
        if is_own or num_tokens < fewest:
            return
        there = [peer for peer in self._peers if peer.endpoint and len(peer.tokens) < MAX_PROMPTS]
        if not there or self._num_uncached(request) < fewest:
            return
        peer = min(there, key=lambda peer: peer.load)
        peer.tokens[request.request_id] = num_tokens
        peer.asked[request.request_id] = now
        request.samples[0] = msgspec.structs.replace(first, kv_source=peer.endpoint)
        origin = request.origin
        self._send(
            peer,
            Prefill(
                request.request_id,
                request.prompt_token_ids,
                first.cache_salt,
                origin.priority,
                origin.tenant,
            ),
        )

    def _num_uncached(self, request: ParentRequest) -> int:
        """Returns the number of a prompt's tokens that are not cached here."""
        size = self._facts.block_size
        first = self._facts.original.first_position(len(request.prompt_token_ids))
        hashing = BlockHashing(request.samples[0].cache_salt, first_position=first)
        names = hashing.digests(request.prompt_token_ids, size)
        return len(request.prompt_token_ids) - size * self._cached.num_known(names)

    def _send(self, peer: PrefillPeer, message: FrontRequestMessage) -> None:
        peer.socket.send(self._encode(message), zmq.NOBLOCK)

    # -- peers -------------------------------------------------------------------------------------

    async def _watch(self, peer: PrefillPeer) -> None:
        """Sends a Hello to a peer whenever it connects; when it disconnects, computes its prompts
        here.
        """
        events = peer.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        host, port = parse_address(peer.address, name="prefill_peer")
        peer.socket.connect(endpoint(host, port))
        while True:
            event: Any = await recv_monitor_message(events)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send(peer, Hello(self._facts.facts))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._lose(peer)
            else:
                return

    async def _tell_absence(self, peer: PrefillPeer) -> None:
        """Logs a peer that has not been reached for some time after the start."""
        await asyncio.sleep(REACH_S)
        if not peer.was_reached:
            logger.warning(
                "prefill_peer: %s could not be reached for %g s; prefilling locally and retrying."
                " Check that an engine with --role prefill runs there with the same"
                " kv_transfer_secret",
                peer.address,
                REACH_S,
            )

    def _lose(self, peer: PrefillPeer) -> None:
        if peer.endpoint:
            logger.warning("%s is gone; prefilling locally", peer.address)
        peer.endpoint = ""
        names = list(peer.tokens)
        peer.tokens, peer.asked = {}, {}
        for name in names:
            self._compute_here(name)

    async def _listen(self, peer: PrefillPeer) -> None:
        while True:
            data = await peer.socket.recv()
            try:
                self._take(peer, self._replies.decode(data))
            except UNREADABLE as error:
                logger.warning("%s sent an invalid message: %s", peer.address, error)

    def _take(self, peer: PrefillPeer, message: FrontReplyMessage) -> None:
        peer.was_reached = True
        if isinstance(message, Welcome):
            self._meet(peer, message)
            return
        asked = peer.asked.pop(message.request_id, None)
        if isinstance(message, Accepted):
            if asked is not None:
                self.sending_point.note_round_trip(time.monotonic() - asked)
        elif peer.tokens.pop(message.request_id, None) is not None:
            failed = isinstance(message, Declined) or message.error is not None
            if failed:
                self._compute_here(message.request_id)

    def _meet(self, peer: PrefillPeer, message: Welcome) -> None:
        """Accepts a peer unless its blocks have a different layout."""
        differing = describe_differences(self._facts.facts, message.facts)
        if differing:
            logger.error(
                "%s cannot prefill for this engine: its KV blocks differ (%s)",
                peer.address,
                "; ".join(differing),
            )
        else:
            peer.endpoint = message.endpoint
            num_ranks, own = len(split_endpoints(message.endpoint)), self._facts.num_ranks
            logger.warning(
                "%s prefills for this engine%s",
                peer.address,
                "" if num_ranks == own else f", on {num_ranks} ranks (this engine has {own})",
            )


def describe_differences(own: dict[str, str], others: dict[str, str]) -> Sequence[str]:
    """Describes the facts in which two engines differ, with both values."""
    return [
        f"{name}: {own.get(name, 'nothing')} here, {others.get(name, 'nothing')} there"
        for name in sorted(own | others)
        if own.get(name) != others.get(name)
    ]


UNMEASURED_TOKENS = 256
"""Threshold in tokens until both rates are known: prompts are sent so that the rates can be
measured.
"""
MOST_TOKENS = 1 << 20
"""Longest prompt that is considered. If sending it is not faster, no prompt is sent."""
WINDOW_S = 1.0
"""Time window for the mean of the link's rate, in seconds; older transfers count half, then
less.
"""
RATE_LIFE_S = 60.0
"""Seconds without a transfer after which the link's rate counts as unknown."""
ROUND_TRIPS = 2
"""Number of message round trips before the first block arrives: one for the prompt, one for the
blocks.
"""
WEIGHT = 0.2
"""Weight of the latest round trip in the running mean."""


class RemotePrefillThreshold:
    """Prompt length from which remote prefill is faster, computed from the rates of the engine and
    its link.
    """

    def __init__(self, fixed: int | None, *, token_bytes: float, max_chunk: int) -> None:
        """`fixed` is a fixed threshold; None: computed from the rates. `token_bytes`: bytes of a
        token in all cache groups. `max_chunk`: maximum number of tokens in a step.
        """
        self._given = fixed
        self._token_bytes = token_bytes
        self._max_chunk = max_chunk
        self._costs = UNMEASURED
        self._stored = StoredBytes()
        self._bytes = self._seconds = 0.0
        """Sums over the transfers of the window."""
        self._moved_at = -math.inf
        """Time of the last transfer."""
        self._round_trip_s = 0.0
        self._derived: float = UNMEASURED_TOKENS
        self._is_fresh = False
        """Whether the threshold has been computed from the current rates."""

    def note(self, costs: StepCosts | None, stored: StoredBytes, now: float) -> None:
        """Updates the step costs, if a step reports them, and the totals of received blocks."""
        if costs is not None:
            self._costs, self._is_fresh = costs, False
        num_bytes = stored.link_bytes - self._stored.link_bytes
        if num_bytes > 0:
            seconds = stored.link_s - self._stored.link_s
            self._bytes, self._seconds = self._bytes + num_bytes, self._seconds + seconds
            if self._seconds > WINDOW_S:
                self._bytes, self._seconds = self._bytes / 2, self._seconds / 2
            self._moved_at, self._is_fresh = now, False
        self._stored = stored  # the totals restart at 0 if an engine was replaced

    def note_round_trip(self, seconds: float) -> None:
        """Records the round-trip time of a message."""
        mean = self._round_trip_s or seconds
        self._round_trip_s = mean + WEIGHT * (seconds - mean)
        self._is_fresh = False

    def num_tokens(self, now: float) -> float:
        """Returns the minimum number of uncached tokens to send; infinity if sending is never
        faster.
        """
        if self._given is not None:
            return self._given
        if now - self._moved_at > RATE_LIFE_S or not self._seconds or not self._costs.points:
            return UNMEASURED_TOKENS
        if not self._is_fresh:
            self._derived, self._is_fresh = self._fewest(), True
        return self._derived

    def _fewest(self) -> float:
        """Finds the threshold by bisection: the advantage of sending grows with the number of
        tokens, or sending is never faster.
        """
        if not self._is_worth_it(MOST_TOKENS):
            return math.inf
        low, high = 0, MOST_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_worth_it(middle) else (middle, high)
        return high

    def _is_worth_it(self, num_tokens: int) -> bool:
        chunk = self._max_chunk
        whole, rest = divmod(num_tokens, chunk)
        step_s = self._costs.step_s(chunk, 0)
        rest_s = self._costs.step_s(rest, 0) if rest else 0.0
        if step_s is None or rest_s is None:
            return False
        keys = chunk * whole * (whole + 1) // 2
        here_s = whole * step_s + rest_s + self._costs.key_s * (keys + (num_tokens if rest else 0))
        link_s = num_tokens * self._token_bytes * self._seconds / self._bytes
        return here_s > ROUND_TRIPS * self._round_trip_s + link_s
