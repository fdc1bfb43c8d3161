"""Messages between the control plane and the execution plane: StepPlan to the worker, StepResult
back.

Data classes of ids and numbers, without tensors, request objects or text, all serializable as
msgpack. Those of KV blocks are in `kv_messages.py`.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from octavo.api.pooling_params import RequestParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.kv_messages import BlockMove, ConnectorPlan, ConnectorReport


class ResultKind(Enum):
    """Result of a row in a step; values as in recordings."""

    NONE = ""
    SAMPLE = "draw"
    POOL = "pool"


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter: the digest of its content, and its path."""

    digest: bytes
    path: str
    name: str = ""
    """Name for messages."""


class AdapterLoad(msgspec.Struct):
    """An adapter to load into a slot of the device."""

    slot: int
    ref: AdapterRef


class AdapterLoaded(msgspec.Struct):
    """Outcome of an AdapterLoad: rows may use the adapter, or the fault."""

    digest: bytes
    fault: str | None = None


class MediaItem(msgspec.Struct, frozen=True):
    """An image in a request, and its tokens."""

    digest: bytes
    """Digest of its pixels and preprocessing."""
    place: int
    """Index of its first token."""
    num_tokens: int
    grid: tuple[int, int]
    """Rows and columns of its tokens on the image."""
    is_whole: bool = False
    """Whether its tokens attend to one another and must be computed in one step."""

    @property
    def end(self) -> int:
        """One past the index of its last token."""
        return self.place + self.num_tokens


class MediaPixels(msgspec.Struct, frozen=True):
    """The pixels of an image, in the model's size."""

    digest: bytes
    height: int
    width: int
    data: bytes
    """Rows of pixels, three bytes each: red, green, blue."""


class EncoderInput(msgspec.Struct, frozen=True):
    """The input of a request's encoder: tokens of a text, or rows of numbers such as a sound's."""

    digest: bytes
    """Digest of the content."""
    token_ids: list[int] = []
    rows: bytes = b""
    """Rows `[T, W]` in fp32, little-endian; empty for a text."""
    num_rows: int = 0
    """Number of `rows`."""

    @property
    def num_tokens(self) -> int:
        """Number of rows that the encoder computes."""
        return self.num_rows or len(self.token_ids)


class NewRequest(msgspec.Struct):
    """A row to add to the worker's InputBatch: of a new request, or one that returns after a
    preemption.
    """

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, and those generated before a preemption."""
    num_prompt_tokens: int
    params: RequestParams
    seed: int
    """Sampling seed of 64 bits, always set."""
    sample_index: int = 0
    """Index among the n samples of the prompt; part of the Philox counter."""
    end_token_ids: list[int] = []
    """Tokens that end the request (end of sequence unless ignored, stop_token_ids); banned until
    `params.min_tokens` are generated.
    """
    grammar: GrammarSpec | None = None
    """Grammar of structured output; None without one."""
    mirostat_mu: float | None = None
    """State of mirostat after `token_ids`; None: the initial one, 2 * mirostat_tau."""
    second_start: int | None = None
    """Index of the first token of the second text, for a pair of texts."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: none."""
    media: list[MediaItem] = []
    """Images in the prompt, in order."""
    encoder_input: EncoderInput | None = None
    """Input of the encoder; None for a decoder-only model."""
    first_position: int = 0
    """Position of its first token."""


class TableEnd(msgspec.Struct):
    """New length of a row's block tables after freeing blocks that were allocated for rejected
    draft tokens or for decode steps that were not computed.
    """

    request_id: str
    num_blocks: list[int]
    """Length of the table of each cache group, in blocks."""


class ScheduledRequest(msgspec.Struct):
    """A row of a step: `num_tokens` tokens from position `start` on are computed."""

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: list[list[int]]
    """Block ids appended to the row's table since the last step, by cache group; [] if there are
    none.
    """
    replaced_blocks: list[tuple[int, int, int]] = []
    """Entries of the table changed by copy-on-write: (group, index in the table, new block id)."""
    program: str = "decoder"
    """Name of the model's Program that computes it."""
    result_kind: ResultKind = msgspec.field(default=ResultKind.NONE, name="wants")
    """Result of the last of its tokens: a sampled token or a pooled row."""
    num_prompt_logprobs: int | None = None
    """Number of top alternatives for each prompt position; None without prompt logprobs."""
    search_of: str = ""
    """Request whose beam search uses the row's logprobs; "" for other rows."""
    from_device: bool = False
    """Whether its one token is sampled by the step before, and only the device knows it."""

    draft_ids: list[int] = []
    """Draft tokens after the last known token, verified in this step: a token is sampled after the
    last known token and after each draft token, and kept if all drafts before it were accepted.
    """
    draft_parents: list[int] = []
    """Index of each draft token's parent among them, -1: the last known token; []: a chain. For a
    tree, the paths are those of `draft_tree.DraftTree`.
    """
    leaf_blocks: list[list[tuple[int, int, int]]] = []
    """Table entries in which each path of a draft tree but the first differs from the row's:
    (group, index in the table, block id).
    """

    propose: int = 0
    """Maximum number of tokens that a draft model proposes after the step's samples."""
    max_num_tokens: int | None = None
    """Maximum length of a row with a grammar, prompt included; None without one."""
    num_encoded: int = 0
    """Rows of its encoder's input, if this step computes them; otherwise 0."""

    @property
    def owner(self) -> str:
        """The request that the row is computed for."""
        return self.search_of or self.request_id


class StepPlan(msgspec.Struct):
    """Plan of one step. The worker shortens tables, moves blocks out, frees rows, adds rows, moves
    blocks in (from the first "swap_in" on), then computes.
    """

    step: int
    freed_rows: list[str]
    new_rows: list[NewRequest]
    moves: list[BlockMove]
    rows: list[ScheduledRequest]
    connector: ConnectorPlan | None = None
    num_steps: int = 1
    """Maximum number of decode steps. More than 1 only if each row computes and samples one token;
    the sampled token is its next one, and `start` advances with each step.
    """
    table_ends: list[TableEnd] = []
    """Tables that have become shorter since the last plan."""
    compiles: list[GrammarSpec] = []
    """Grammars that the worker begins to compile in the background."""
    adapters: list[AdapterLoad] = []
    """Adapters that the worker begins to load in the background."""
    encodes: list[MediaPixels] = []
    """Images that are encoded before the step's rows are computed."""
    dropped_media: list[bytes] = []
    """Digests of the images whose rows are freed before others are encoded."""
    joins: bool = False
    """Whether a plan without rows computes a step all the same, whose experts compute the rows of
    other engines."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, those of encoders included."""
        return sum([row.num_tokens + row.num_encoded for row in self.rows])


class TokenLogprobs(msgspec.Struct):
    """Logprobs of one position: the token's own, then the top `k`, with their ranks (1 is the most
    likely).
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RowResult(msgspec.Struct):
    """The result of one row of a step."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Logprobs of prompt tokens in this chunk; entry i belongs to the prompt token at `start + 1 +
    i`.
    """
    failure: str | None = None
    """Reason why this row failed (for example NaN logits), with which its request ends; None if it
    did not.
    """
    num_kept: int = 0
    """Number of computed tokens from `start` on that are kept: those of rejected drafts are not. 0
    if the row failed.
    """
    mirostat_mu: float | None = None
    """State of mirostat after `token_ids`; None without mirostat."""
    pooled: bytes | None = None
    """The pooled row in fp32, little-endian; None if the row pools nothing."""
    draft_ids: list[int] = []
    """Tokens that the worker proposes after `token_ids`."""
    draft_parents: list[int] = []
    """Index of each of `draft_ids`' parent among them, -1: the last token; []: a chain."""
    kept_path: int = 0
    """Path of the row's draft tree whose blocks are kept; those of the others are freed."""


class WeightArrivals(msgspec.Struct, frozen=True):
    """Weights read from a file for steps since the engine's start."""

    num_bytes: int = 0
    num_found: int = 0
    """Pieces of weights that had arrived when an op needed them."""
    num_waited: int = 0
    """Pieces of weights that an op waited for."""
    wait_s: float = 0.0
    """Seconds for which ops waited."""
    neurons_found: int = 0
    """Neurons that were in memory when a step used them."""
    neurons_read: int = 0
    """Neurons read from disk for a step."""
    neurons_foreseen: int = 0
    """Neurons that were prefetched."""
    neurons_foreseen_used: int = 0
    """Neurons that were prefetched and then used by the step."""

    def __add__(self, other: WeightArrivals) -> WeightArrivals:
        return WeightArrivals(
            *(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__)
        )

    def share_since(self, earlier: WeightArrivals, count: int) -> WeightArrivals:
        """Divides what was read since `earlier` into equal shares of `count` requests; returns one
        share.
        """
        found = {
            name: (getattr(self, name) - getattr(earlier, name)) / count
            for name in self.__struct_fields__
        }
        return WeightArrivals(
            **{name: share if name == "wait_s" else round(share) for name, share in found.items()}
        )


class StepResult(msgspec.Struct):
    """The results of a plan's rows in one step, in the plan's order."""

    step: int
    rows: list[RowResult]
    busy_s: float = 0.0
    """Seconds for which the device was busy, block moves included."""
    moved_s: float = 0.0
    """Seconds of `busy_s` spent on block moves between device and host."""
    connector: ConnectorReport | None = None
    kv_bytes: int | None = None
    """Bytes of KV memory on the device if it is allocated on demand; otherwise None."""
    compiled: list[bytes] = []
    """Digests of the grammars that were compiled since the last result."""
    adapters: list[AdapterLoaded] = []
    """Adapters that were loaded since the last result, or could not be."""
    not_encoded: list[bytes] = []
    """Digests of images of the plan that could not be encoded."""
    weights: WeightArrivals | None = None
    """Weights read from a file so far; None if all are in memory."""
    counters: dict[str, float] | None = None
    """Counters of extensions since the engine's start; None if there are none."""
