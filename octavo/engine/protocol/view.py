"""View of a running engine at one moment: its requests, KV blocks and last steps.

Data only; sent between processes. Its size is bounded: MAX_BLOCKS blocks per cache group,
MAX_REQUESTS requests if blocks are included, and MAX_STEPS steps.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MAX_BLOCKS = 4096
"""Most blocks of one cache group that a map shows, those of the lowest ids."""
MAX_REQUESTS = 512
MAX_STEPS = 256
"""Most steps between two views; earlier ones are left out."""

FREE, CACHED, HELD, SHARED, SWAPPED = range(5)
"""States of a block: empty; free, but found again by its name; held by one row; held by several;
in host memory.
"""


class BlockRun(NamedTuple):
    """Consecutive blocks of the same state, of the same request."""

    first: int
    num_blocks: int
    state: int
    request_id: str
    """The core's id of a request that holds them; "" where none does."""


class BlockCounts(msgspec.Struct):
    """Number of blocks of one cache group by state, including those not in the view."""

    free: int
    cached: int
    held: int
    """Blocks that one row holds."""
    shared: int
    swapped: int


class BlockMap(msgspec.Struct):
    """The blocks of one cache group, by id."""

    window: int | None
    """Window in tokens; None if every token sees all before it."""
    num_blocks: int
    counts: BlockCounts
    num_shown: int
    """Number of blocks that `runs` cover, from id 0 on."""
    runs: list[BlockRun]
    num_host_blocks: int
    host_runs: list[BlockRun]
    """Host memory's blocks in use, among the first MAX_BLOCKS."""


class StepMark(NamedTuple):
    """An executed step."""

    step: int
    ms: float
    """Wall clock, in milliseconds."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_rows: int


class RequestView(msgspec.Struct):
    """One unfinished request of the core: a sample, or a beam search."""

    request_id: str
    state: str
    """One of "waiting", "running" and "swapped"."""
    waits_for: str
    """Reason why it does not run; "" while it does."""
    waited_s: float
    """Seconds since it arrived, or was preempted, while it does not run; else those before its
    start.
    """
    waits: dict[str, float]
    """Seconds in the queue by what it waited for; {} in a view with blocks."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_blocks: int
    """Blocks that it holds on the device, of all groups; shared ones count."""
    priority: int


class EngineView(msgspec.Struct):
    """An engine between two steps."""

    now: float
    """Moment on the machine's monotonic clock, in seconds."""
    block_size: int
    """Number of tokens in a block."""
    num_requests: int
    requests: list[RequestView]
    """Running ones first, then swapped ones, then waiting ones in the order of their start."""
    waits_for: str = ""
    """Reason why the first waiting request does not start."""
    blocks: list[BlockMap] = []
    """A map for each cache group; empty if it was not asked for."""
    steps: list[StepMark] = []
    """Steps since the last view."""
