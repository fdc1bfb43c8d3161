"""Unfinished and recently finished requests in a form for users: state, reasons, tokens, text.

Combines data of the frontend (prompts, texts, tenants) with data of the core (states, reasons to
wait).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from octavo.api.outputs import FinishReason
from octavo.api.pooling_params import RequestParams
from octavo.engine.protocol.requests import ON_ITS_WAY
from octavo.engine.protocol.view import EngineView, RequestView
from octavo.frontend.output_processor import RequestState, Sample


class LiveSample(msgspec.Struct):
    """One of a request's samples."""

    index: int
    state: str
    """One of "waiting", "running", "swapped" and "finished"."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_computed_tokens: int = 0
    num_blocks: int = 0
    """KV blocks that it holds on the device, including shared ones."""


class LiveRequest(msgspec.Struct):
    """A waiting, running or recently finished request."""

    request_id: str
    state: str
    """State of the most advanced sample: "running", then "swapped", "waiting", "finished"."""
    waits_for: str
    """Reason why it does not run; "" while it runs."""
    waited_s: float
    """Seconds without running: until its start, or since it was preempted."""
    waits: dict[str, float]
    """Seconds in the queue, by reason."""
    arrival_time: float
    """Time of arrival on the machine's monotonic clock, in seconds."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: RequestParams
    priority: int
    tenant: str
    owner: str
    num_cached_tokens: int
    num_preemptions: int
    samples: list[LiveSample]


STATES = ("running", "swapped", "waiting", "finished")


def live_request(
    state: RequestState, views: Mapping[str, RequestView], *, trouble: str = ""
) -> LiveRequest:
    """Returns one request combined with the core's views of its samples. `trouble` is the reason
    why there is no core at the moment, if any.
    """
    request = state.request
    sample_views = [views.get(one.request_id) for one in request.samples]
    # A beam search is one request of the core; its beams are known only at its end.
    views_by_sample = (
        sample_views
        if len(sample_views) == len(state.samples)
        else sample_views[:1] * len(state.samples)
    )
    samples = [_sample(one, view) for one, view in zip(state.samples, views_by_sample, strict=True)]
    first = min(samples, key=lambda one: STATES.index(one.state), default=None)
    shown = next((one for one in sample_views if one and first and one.state == first.state), None)
    waits = "" if first is None or first.state in ("running", "finished") else ON_ITS_WAY
    return LiveRequest(
        request.request_id,
        "waiting" if first is None else first.state,
        waits_for=shown.waits_for if shown else waits and (trouble or waits),
        waited_s=shown.waited_s if shown else 0.0,
        waits=shown.waits if shown else {},
        arrival_time=request.arrival_time,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        params=request.params,
        priority=request.origin.priority,
        tenant=request.origin.tenant,
        owner=request.origin.owner,
        num_cached_tokens=shown.num_cached_tokens if shown else state.num_cached_tokens,
        num_preemptions=sum(one.num_preemptions for one in sample_views if one),
        samples=samples,
    )


def views_by_id(view: EngineView | None) -> dict[str, RequestView]:
    """Returns a view's requests by core request id; {} without a view."""
    return {} if view is None else {one.request_id: one for one in view.requests}


def _sample(sample: Sample, view: RequestView | None) -> LiveSample:
    finished = sample.finish_reason is not None
    state = "finished" if finished else "waiting" if view is None else view.state
    live = LiveSample(
        sample.index, state, sample.text(), list(sample.token_ids), sample.finish_reason
    )
    if view is not None and not finished:
        live.num_computed_tokens, live.num_blocks = view.num_computed_tokens, view.num_blocks
    return live
