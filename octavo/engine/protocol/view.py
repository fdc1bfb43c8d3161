"""View of a running engine at one moment: its requests, KV blocks and last steps.

Data only; sent between processes. Its size is bounded: MAX_BLOCKS blocks per cache group,
MAX_REQUESTS requests if blocks are included, and MAX_STEPS steps.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MAX_BLOCKS = 4096
"""Maximum number of blocks of one cache group in a view, by lowest id."""
MAX_REQUESTS = 512
MAX_STEPS = 256
"""Maximum number of steps between two views; earlier ones are omitted."""

FREE, CACHED, HELD, SHARED, SWAPPED = range(5)
"""States of a block: empty; free, but in the prefix cache; held by one row; held by several rows;
in host memory.
"""


class BlockRun(NamedTuple):
    """Consecutive blocks with the same state that belong to the same request."""

    first: int
    num_blocks: int
    state: int
    request_id: str
    """Core id of a request that holds the blocks; "" if none does."""


class BlockCounts(msgspec.Struct):
    """Number of blocks of one cache group by state, including those not in the view."""

    free: int
    cached: int
    held: int
    """Blocks held by one row."""
    shared: int
    swapped: int


class BlockMap(msgspec.Struct):
    """The blocks of one cache group, by id."""

    window: int | None
    """Window in tokens; None if every token attends to all earlier ones."""
    num_blocks: int
    counts: BlockCounts
    num_shown: int
    """Number of blocks that `runs` cover, starting at id 0."""
    runs: list[BlockRun]
    num_host_blocks: int
    host_runs: list[BlockRun]
    """Host blocks in use, among the first MAX_BLOCKS."""


class StepMark(NamedTuple):
    """An executed step."""

    step: int
    ms: float
    """Wall clock time in milliseconds."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_rows: int


class RequestView(msgspec.Struct):
    """One unfinished request of the core: a sample, or a beam search."""

    request_id: str
    state: str
    """One of "waiting", "running" and "swapped"."""
    waits_for: str
    """Reason why the request does not run; "" while it runs."""
    waited_s: float
    """Seconds since arrival or preemption while the request does not run; otherwise the seconds
    before its start.
    """
    waits: dict[str, float]
    """Seconds in the queue by reason for waiting; {} in a view with blocks."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_blocks: int
    """Number of blocks that it holds on the device, over all groups, including shared ones."""
    priority: int


class EngineView(msgspec.Struct):
    """State of an engine between two steps."""

    now: float
    """Time of the view on the machine's monotonic clock, in seconds."""
    block_size: int
    """Number of tokens in a block."""
    num_requests: int
    requests: list[RequestView]
    """Running requests first, then swapped ones, then waiting ones in the order in which they will
    start.
    """
    waits_for: str = ""
    """Reason why the first waiting request does not start."""
    blocks: list[BlockMap] = []
    """A map for each cache group; empty if not requested."""
    steps: list[StepMark] = []
    """Steps since the last view."""
