"""Messages from the frontend to the engine core: requests, changes, pins.

Data only; sent between processes.
"""

from __future__ import annotations

import msgspec

from octavo.api.pooling_params import RequestParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.step import AdapterRef, EncoderInput, MediaContent, MediaItem
from octavo.engine.protocol.view import EngineView

ON_ITS_WAY = "on its way to the engine"


MAX_PRIORITY = (1 << 31) - 1
"""Maximum absolute value of a priority that users may set."""

BACKGROUND_PRIORITY = MAX_PRIORITY + 1
"""Priority of background work under every policy; above the range of users' priorities."""


class EngineRequest(msgspec.Struct):
    """A validated request, in the form that the frontend sends to the core."""

    request_id: str
    prompt_token_ids: list[int]
    params: RequestParams
    seed: int
    """Sampling seed, 64 bits, always set."""
    eos_token_ids: list[int] = []
    """End-of-sequence ids; empty if the request ignores them."""
    sample_index: int = 0
    fork_of: str | None = None
    """Id of the request whose blocks this one shares; None for an independent request."""
    fork_tokens: int | None = None
    """Number of first tokens that it has in common with `fork_of`; it shares the blocks of those
    that are computed when it starts. None: both have the same prompt.
    """
    cache_salt: str = ""
    """Salt of its block hashes; only requests with equal salts share cached blocks."""
    priority: int = 0
    """Priority under the policy `priority`; lower values start first. BACKGROUND_PRIORITY is last
    under every policy.
    """
    tenant: str = ""
    """Tenant of the request, for the fair policy."""
    arrival_time: float = 0.0
    """Time of arrival, in seconds on the machine's monotonic clock."""
    output_token_ids: list[int] = []
    """Tokens that an earlier core has already sampled."""
    resumed: bool = False
    """Whether an earlier core has already received the request."""
    grammar: GrammarSpec | None = None
    """Grammar of structured output; None without one."""
    mirostat_mu: float | None = None
    """Mirostat's mu after `output_token_ids`, if an earlier core reported it."""
    program: str = "decoder"
    """Name of the model's Program that computes the request."""
    second_start: int | None = None
    """Index of the first token of the second text if the prompt is a pair of texts."""
    kv_source: str = ""
    """Address of the engine that computes the KV blocks of the prompt; "" if this engine does."""
    sends_kv: bool = False
    """Whether the request computes a prompt whose KV blocks another engine fetches."""
    adapter: AdapterRef | None = None
    """Adapter of the request; None for the base model."""
    media: list[MediaItem] = []
    """Images in the prompt, in order."""
    pixels: list[MediaContent] = []
    """Pixels of the images, once for each distinct image."""
    encoder_input: EncoderInput | None = None
    """Input of the encoder; None for a decoder-only model."""
    one_token: bool = False
    """Whether it ends with finish_reason "abort" after one more token, unless it finishes with that
    token anyway.
    """


class RequestChange(msgspec.Struct):
    """New params and priority of one request, validated by the frontend."""

    request_id: str
    params: RequestParams
    """All params, not only the changed ones. Only params that the worker does not read may differ
    from the earlier ones.
    """
    priority: int
    computes_here: bool = False
    """Whether the request stops waiting for another engine's blocks and computes its prompt
    here.
    """


class PrefixRef(msgspec.Struct):
    """Tokens whose blocks are identified by hashes, and the other inputs of these hashes."""

    token_ids: list[int]
    salt: str = ""
    adapter_digest: bytes = b""
    """Digest of the adapter's content; empty for the base model."""
    media: list[MediaItem] = []

    def __repr__(self) -> str:
        return f"PrefixRef({len(self.token_ids)} tokens)"


class Pin(msgspec.Struct, tag=True):
    """A computed prefix, and the time until which its blocks are kept."""

    prefix: PrefixRef
    until: float
    """Expiry time in seconds since 1970; if it is not after `now`, an earlier pin is removed."""
    now: float
    """Time at which the pin was created, in seconds since 1970."""


class CountStored(msgspec.Struct, tag=True):
    """Query: the number of a prefix's tokens whose blocks are in the store behind the slots, or the
    bytes that a request reads after them.
    """

    prefix: PrefixRef
    in_bytes: bool = False


class FetchPrefix(msgspec.Struct, tag=True):
    """Query: fetch a prefix's blocks from the store into slots. The reply is FETCHING until they
    have arrived, then the number of tokens that the next request need not compute.
    """

    prefix: PrefixRef


class ViewEngine(msgspec.Struct, tag=True):
    """Query: the engine's current state."""

    with_blocks: bool


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Query: clear the prefix cache on the device. The reply is 1, or 0 if nothing was cleared
    because requests hold blocks.
    """

    reset_connector: bool = False
    """Whether host memory and disk are also cleared."""


Query = ResetPrefixCache | Pin | CountStored | FetchPrefix | ViewEngine
QueryAnswer = int | EngineView
"""For Pin, the number of pinned tokens."""

FETCHING = -1
"""Reply to FetchPrefix while blocks are on their way."""
