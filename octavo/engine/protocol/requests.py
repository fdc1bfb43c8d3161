"""Messages from the frontend to the engine core: requests, changes, pins.

Data only; sent between processes.
"""

from __future__ import annotations

import msgspec

from octavo.api.pooling_params import RequestParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.step import AdapterRef, EncoderInput, MediaItem, MediaPixels
from octavo.engine.protocol.view import EngineView

ON_ITS_WAY = "on its way to the engine"


MAX_PRIORITY = (1 << 31) - 1
"""Maximum absolute value of a priority that users give."""

BACKGROUND_PRIORITY = MAX_PRIORITY + 1
"""Priority of background work under every policy; above all that users may give."""


class EngineRequest(msgspec.Struct):
    """A validated request, as the frontend sends it to the core."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    seed: int
    """Seed of its draws, 64 bits, always set."""
    eos_token_ids: list[int] = []
    """End-of-sequence ids; empty if the request ignores them."""
    sample_index: int = 0
    fork_of: str | None = None
    """Request that shares its blocks with this one; None for a request by itself."""
    fork_tokens: int | None = None
    """Number of its first tokens that are `fork_of`'s too: it shares the blocks of those that are
    computed when it starts. None: the request computes the same prompt.
    """
    cache_salt: str = ""
    """Salt of the names of its blocks; prefix hits happen among equal salts only."""
    priority: int = 0
    """Priority under the policy of that name; lower values start first. BACKGROUND_PRIORITY
    stands behind all others under every policy.
    """
    tenant: str = ""
    """Name of the tenant, among which a fair policy shares."""
    arrival_time: float = 0.0
    """Time of arrival, in seconds on the monotonic clock of the machine."""
    output_token_ids: list[int] = []
    """Tokens that an earlier core has already sampled for it."""
    resumed: bool = False
    """Whether an earlier core knew the request."""
    grammar: GrammarSpec | None = None
    """Grammar of its text; None: any text."""
    mirostat_mu: float | None = None
    """State of mirostat after `output_token_ids`, if an earlier core reported it."""
    program: str = "decoder"
    """Name of the model's Program that computes it."""
    second_start: int | None = None
    """Index of the first token of the second text, for a pair of texts."""
    kv_source: str = ""
    """Address of the engine that computes its prompt's KV blocks; "" where this one does."""
    sends_kv: bool = False
    """Whether it is computed for another engine, which fetches the prompt's KV blocks."""
    adapter: AdapterRef | None = None
    """Adapter that its tokens are computed with; None: the plain model."""
    media: list[MediaItem] = []
    """Images among the prompt's tokens, in their order."""
    pixels: list[MediaPixels] = []
    """Pixels of the prompt's images, each image once."""
    encoder_input: EncoderInput | None = None
    """Input of the encoder before the decoder that computes its tokens; None without one."""
    one_token: bool = False
    """Whether it ends as aborted once it has one more token, unless that one is its end anyway."""


class RequestChange(msgspec.Struct):
    """New params and priority of one request, validated by the frontend."""

    request_id: str
    params: RequestParams
    """All of its params; only what the worker does not know may differ from those before."""
    priority: int
    computes_here: bool = False
    """Whether it waits no more for blocks of another engine, and computes its prompt itself."""


class Pin(msgspec.Struct, tag=True):
    """A computed prompt and the time until which its blocks are kept."""

    token_ids: list[int]
    salt: str
    until: float
    """End of the pin, in seconds since 1970; not after `now`, it ends an earlier pin."""
    now: float
    """Time at which the pin was made, in seconds since 1970."""


class ViewEngine(msgspec.Struct, tag=True):
    """Query: the engine's current state."""

    with_blocks: bool


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Query: clear the prefix cache on the device. The reply is 1, or 0 if nothing was cleared
    because requests hold blocks.
    """

    reset_connector: bool = False
    """Whether host memory and disk are cleared too."""


Query = ResetPrefixCache | Pin | ViewEngine
QueryAnswer = int | EngineView
"""For Pin the number of tokens that are kept."""
