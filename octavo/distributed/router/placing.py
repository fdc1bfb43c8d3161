"""Assigns requests to servers by the routing policy, and tracks them until they end."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import quote

from octavo.distributed.router.members import Member, Members
from octavo.distributed.router.upstream import UpstreamLost, UpstreamRequest
from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.policies import ROUTING_POLICIES, RoutingPolicyName, get_session_score
from octavo.engine.routing.router import Router

MAX_KEPT = 100_000
"""Maximum number of stored responses whose server is remembered."""
MAX_ID_CHARACTERS = 256
"""Maximum length of a stored response's id."""


class PlacedRequest:
    """A request that is assigned to a server."""

    def __init__(
        self, placer: Placer, member: Member, name: str, job: RoutingJob, index: int
    ) -> None:
        self.member = member
        self.index = index
        self._router = placer.router
        self._name = name
        self.num_cached = self._router.sent(name, job, index, time.monotonic())
        """Number of prompt tokens that are expected to be cached there."""
        member.num_running += 1

    def record_tokens(self, num_tokens: int) -> None:
        """Records output tokens; the first call means that the prompt has been computed."""
        self._router.record_tokens(self._name, num_tokens, time.monotonic())

    def end(self) -> None:
        """Records that the server has finished the request."""
        self._router.ended(self._name)
        self.member.num_running -= 1


class Placer:
    """Chooses the server of each request."""

    def __init__(self, members: Members, policy: RoutingPolicyName) -> None:
        self._members = members
        self.router = Router(ROUTING_POLICIES[policy](), [member.target for member in members])
        self._numbers = itertools.count()
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Index of the server that has a stored response, by response id."""

    @property
    def needs_hashes(self) -> bool:
        return self.router.needs_hashes

    def place(self, job: RoutingJob, model: str | None, tried: set[int]) -> PlacedRequest | None:
        """Assigns a request to the best server that has not been tried; returns None if there is
        none.
        """
        candidates = self._members.get_candidates(model, tried)
        if not candidates:
            return None
        return self.assign(self.router.choose(job, candidates, time.monotonic()), job)

    def assign(self, index: int, job: RoutingJob) -> PlacedRequest:
        """Assigns a request to the server `index`."""
        return PlacedRequest(self, self._members[index], str(next(self._numbers)), job, index)

    def get_least_busy(self, tried: set[int], model: str | None = None) -> int | None:
        """Returns the server with the fewest running requests among those that serve the model;
        None if there is none.
        """
        candidates = self._members.get_candidates(model, tried)
        return min(candidates, key=lambda index: self._members[index].num_running, default=None)

    def get_owner_server(self, sender: bytes) -> int:
        """Returns the server that stores a client's files and batches, even if it is unhealthy."""

        def rank(index: int) -> bytes:
            return get_session_score(sender, self._members[index].target.label)

        here = [index for index, one in enumerate(self._members) if one.standing != "gone"]
        return max(here or range(len(self._members)), key=rank)

    async def find_stored_response(
        self, response_id: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> int | None:
        """Returns the server that has a stored response, by asking each healthy server with the
        client's `headers`; None if none has it.
        """
        known = self._kept.get(response_id)
        if known is not None and self._members[known].standing != "gone":
            return known
        if len(response_id) > MAX_ID_CHARACTERS:
            return None
        for index in self._members.get_candidates(None, set()):
            client = self._members[index].client
            path = f"/v1/responses/{quote(response_id, safe='')}"
            try:
                answer = await client.send(UpstreamRequest("GET", path, headers))
                try:
                    await answer.read_all()
                finally:
                    client.finish(answer)
            except UpstreamLost:
                continue
            if answer.status == 200:
                self._kept[response_id] = index
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
                return index
        return None
