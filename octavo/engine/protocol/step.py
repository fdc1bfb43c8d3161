"""Messages between the control plane and the execution plane: StepPlan to the worker, StepResult
back.

Data classes with ids and numbers, without tensors, request objects or text, all serializable as
msgpack. The messages about KV blocks are in `kv_messages.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from octavo.api.pooling_params import RequestParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.kv_messages import BlockMove, ConnectorPlan, ConnectorReport


class ResultKind(Enum):
    """Kind of result that a step returns for a row. The values are part of the recording format."""

    NONE = ""
    SAMPLE = "draw"
    POOL = "pool"


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter: the digest of its content, and its path."""

    digest: bytes
    path: str
    name: str = ""
    """Name for error messages."""


class AdapterLoad(msgspec.Struct):
    """An adapter to load into a slot of the device."""

    slot: int
    ref: AdapterRef


class AdapterLoaded(msgspec.Struct):
    """Outcome of an AdapterLoad: rows may now use the adapter, or `fault` says why not."""

    digest: bytes
    fault: str | None = None


class MediaItem(msgspec.Struct, frozen=True):
    """An image or audio in a request, and the range of its tokens."""

    digest: bytes
    """Digest of its pixels and preprocessing."""
    start: int
    """Index of its first token."""
    num_tokens: int
    grid: tuple[int, int]
    """Number of rows and columns of tokens that represent the image; an audio is one row."""
    is_whole: bool = False
    """Whether its tokens attend to each other and must be computed in one step."""
    line_tokens: int = 0
    """Tokens of a line of the grid if a text token ends each line; 0: there are no such tokens."""
    time: int = 0
    """Offset of its position in time (M-RoPE)."""
    joins: bool = False
    """Whether it continues a video: its rows and columns have the positions of the item before."""

    @property
    def end(self) -> int:
        """One past the index of its last token."""
        return self.start + self.num_tokens

    @property
    def is_encoded(self) -> bool:
        """Whether an encoder computes its rows; otherwise the range is one of text."""
        return self.grid != (0, 0)


class MediaContent(msgspec.Struct, frozen=True):
    """Pixels of an image or of a video's frames, resized for the model; an audio's features; or
    prompt embeddings.
    """

    digest: bytes
    height: int
    width: int
    data: bytes
    """Rows of pixels, three bytes each: red, green, blue; frame by frame. For audio: the encoder's
    input rows `[height, width]` in fp32, little-endian. For embeds: the decoder's rows,
    likewise."""
    num_frames: int = 1
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of tiles below a square view of the entire image, each of `width` x `width`
    pixels, which are packed without their padding; (0, 0): one view."""
    source: tuple[int, int] = (0, 0)
    """Height and width of the image that was padded to `tiles`."""
    kind: Literal["image", "audio", "embeds"] = "image"


class EncoderInput(msgspec.Struct, frozen=True):
    """Input of a request's encoder: token ids of a text, or rows of numbers such as audio
    features.
    """

    digest: bytes
    """Digest of the content."""
    token_ids: list[int] = []
    rows: bytes = b""
    """Rows `[T, W]` in fp32, little-endian; empty if the input is a text."""
    num_rows: int = 0
    """Number of `rows`."""

    @property
    def num_tokens(self) -> int:
        """Number of rows that the encoder computes."""
        return self.num_rows or len(self.token_ids)


class NewRequest(msgspec.Struct):
    """A row to add to the worker's InputBatch: of a new request, or of one that resumes after a
    preemption.
    """

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, and tokens generated before a preemption."""
    num_prompt_tokens: int
    params: RequestParams
    seed: int
    """Sampling seed of 64 bits, always set."""
    sample_index: int = 0
    """Index among the n samples of the prompt; part of the Philox counter."""
    end_token_ids: list[int] = []
    """Tokens that end the request (end-of-sequence tokens unless ignored, and stop_token_ids);
    banned until `params.min_tokens` are generated.
    """
    grammar: GrammarSpec | None = None
    """Grammar of structured output; None without one."""
    mirostat_mu: float | None = None
    """Mirostat's mu after `token_ids`; None: the initial value, 2 * mirostat_tau."""
    second_start: int | None = None
    """Index of the first token of the second text if the prompt is a pair of texts."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: none."""
    media: list[MediaItem] = []
    """Images in the prompt, in order."""
    encoder_input: EncoderInput | None = None
    """Input of the encoder; None for a decoder-only model."""
    first_position: int = 0
    """Position of its first token."""


class TableLength(msgspec.Struct):
    """New length of a row's block tables after blocks were freed that had been allocated for
    rejected draft tokens or for decode steps that were not computed.
    """

    request_id: str
    num_blocks: list[int]
    """Length of each cache group's table, in blocks."""


class ScheduledRequest(msgspec.Struct):
    """A row of a step: the `num_tokens` tokens from position `start` on are computed."""

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
    """Kind of result after the last of its tokens: a sampled token, a pooled row, or none."""
    num_prompt_logprobs: int | None = None
    """Number of top alternatives for each prompt position; None without prompt logprobs."""
    search_of: str = ""
    """Id of the request whose beam search uses the row's logprobs; "" for other rows."""
    from_device: bool = False
    """Whether its only token is sampled by the previous step, so that only the device knows it
    yet.
    """

    draft_ids: list[int] = []
    """Draft tokens after the last known token, verified in this step: a token is sampled after the
    last known token and after each draft token; it is kept if all draft tokens before it are
    accepted.
    """
    draft_parents: list[int] = []
    """Index in `draft_ids` of each draft token's parent, -1: the last known token; []: a chain. The
    paths of a tree are `draft_tree.DraftTree.paths`.
    """
    leaf_blocks: list[list[tuple[int, int, int]]] = []
    """For each path of the draft tree except the first, the table entries that differ from the
    row's: (group, index in the table, block id).
    """

    propose: int = 0
    """Maximum number of tokens that a draft model proposes after the step's sampled tokens."""
    max_num_tokens: int | None = None
    """Maximum length of a row with a grammar, prompt included; None without a grammar."""
    num_encoded: int = 0
    """Number of encoder input rows that this step computes; 0 if none."""

    @property
    def owner(self) -> str:
        """Id of the request that the row is computed for."""
        return self.search_of or self.request_id


class StepPlan(msgspec.Struct):
    """Plan of one step. The worker processes it in this order: shorten tables, move blocks out,
    free rows, add rows, move blocks in (from the first "swap_in" on), compute.
    """

    step: int
    freed_rows: list[str]
    new_rows: list[NewRequest]
    moves: list[BlockMove]
    rows: list[ScheduledRequest]
    connector: ConnectorPlan | None = None
    num_steps: int = 1
    """Maximum number of decode steps. More than 1 only if each row computes and samples one token;
    each sampled token is the row's next input, and `start` advances with each step.
    """
    table_lengths: list[TableLength] = []
    """Tables that became shorter since the last plan."""
    compiles: list[GrammarSpec] = []
    """Grammars that the worker starts to compile in the background."""
    adapters: list[AdapterLoad] = []
    """Adapters that the worker starts to load in the background."""
    encodes: list[MediaContent] = []
    """Images to encode before the step's rows are computed."""
    dropped_media: list[bytes] = []
    """Digests of the images whose rows are freed before images are encoded."""
    is_dummy_step: bool = False
    """Whether a plan without rows computes a step anyway, in which its experts compute rows of
    other engines (a dummy step).
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, including encoder tokens."""
        return sum([row.num_tokens + row.num_encoded for row in self.rows])


class TokenLogprobs(msgspec.Struct):
    """Logprobs at one position: first the token itself, then the top `k`; with ranks (1 is the most
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
    """Logprobs of prompt tokens in this chunk; entry i is the logprob of the prompt token at `start
    + 1 + i`.
    """
    failure: str | None = None
    """Reason why this row failed (for example NaN logits) and its request ends; None on success."""
    num_kept: int = 0
    """Number of computed tokens from `start` on that are kept; rejected draft tokens are not kept.
    0 if the row failed.
    """
    mirostat_mu: float | None = None
    """Mirostat's mu after `token_ids`; None without mirostat."""
    pooled: bytes | None = None
    """Pooled row in fp32, little-endian; None if the row is not pooled."""
    draft_ids: list[int] = []
    """Tokens that the worker proposes after `token_ids`."""
    draft_parents: list[int] = []
    """Index in `draft_ids` of each proposed token's parent, -1: the last sampled token; []: a
    chain.
    """
    kept_path: int = 0
    """Index of the draft tree path whose blocks are kept; the blocks of the other paths are
    freed.
    """


class WeightArrivals(msgspec.Struct, frozen=True):
    """Weights read from a file for steps since the engine's start."""

    num_bytes: int = 0
    num_found: int = 0
    """Chunks of weights that had arrived before an op needed them."""
    num_waited: int = 0
    """Chunks of weights that an op waited for."""
    wait_s: float = 0.0
    """Seconds that ops waited."""
    neurons_found: int = 0
    """Neurons that were in memory when a step used them."""
    neurons_read: int = 0
    """Neurons read from disk for a step."""
    neurons_foreseen: int = 0
    """Neurons that were prefetched."""
    neurons_foreseen_used: int = 0
    """Neurons that were prefetched and then used by the step."""
    experts_found: int = 0
    """Experts that were in memory when a router chose them."""
    experts_read: int = 0
    """Experts read from disk when a router chose them."""
    experts_prefetched: int = 0
    """Experts that were prefetched."""
    experts_prefetched_used: int = 0
    """Experts that were prefetched and then chosen by the step."""

    def __add__(self, other: WeightArrivals) -> WeightArrivals:
        return WeightArrivals(
            *(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__)
        )

    def share_since(self, earlier: WeightArrivals, count: int) -> WeightArrivals:
        """Returns the difference to `earlier`, divided by the number of requests `count`."""
        shares = {
            name: (getattr(self, name) - getattr(earlier, name)) / count
            for name in self.__struct_fields__
        }
        return WeightArrivals(
            **{name: share if name == "wait_s" else round(share) for name, share in shares.items()}
        )


class StepResult(msgspec.Struct):
    """Results of a plan's rows in one step, in the plan's order."""

    step: int
    rows: list[RowResult]
    busy_s: float = 0.0
    """Seconds for which the device was busy, block moves included."""
    moved_s: float = 0.0
    """Part of `busy_s` spent on block moves between device and host, in seconds."""
    connector: ConnectorReport | None = None
    kv_bytes: int | None = None
    """Bytes of KV memory on the device if it is allocated on demand; otherwise None."""
    compiled: list[bytes] = []
    """Digests of the grammars that were compiled since the last result."""
    adapters: list[AdapterLoaded] = []
    """Adapters that were loaded or failed to load since the last result."""
    not_encoded: list[bytes] = []
    """Digests of the plan's images that could not be encoded."""
    weights: WeightArrivals | None = None
    """Weights read from a file so far; None if all weights are in memory."""
    counters: dict[str, float] | None = None
    """Counters of extensions since the engine's start; None if there are none."""
