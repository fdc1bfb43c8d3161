"""Messages between the control plane and the execution plane: a StepPlan goes down, a StepResult
comes back.

Owns their data classes, plain ids and numbers only: no tensor, no request object, no text; what
they say of KV blocks stands in `kv_messages.py`. All are msgpack-friendly (msgspec structs of
builtins).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.api.pooling_params import RequestParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.kv_messages import BlockMove, ConnectorPlan, ConnectorReport

Wants = Literal["", "draw", "pool"]
"""Kind of result that a row is to yield: none yet, a drawn token, or a pooled row."""


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter: the digest of its content, and where it is read from."""

    digest: bytes
    path: str
    name: str = ""
    """Name for messages."""


class AdapterLoad(msgspec.Struct):
    """An adapter that takes a slot of the device, in place of what is there."""

    slot: int
    ref: AdapterRef


class AdapterLoaded(msgspec.Struct):
    """Outcome of an AdapterLoad: rows may have the adapter from now on, or why not."""

    digest: bytes
    fault: str | None = None


class MediaItem(msgspec.Struct, frozen=True):
    """An image within a request: which one, and the tokens that stand for it."""

    digest: bytes
    """Digest of its pixels and of how they are read."""
    place: int
    """Index of its first token."""
    num_tokens: int
    grid: tuple[int, int]
    """Rows and columns in which its tokens lie on the image."""
    is_whole: bool = False
    """Whether its tokens see one another, and are computed in one step."""

    @property
    def end(self) -> int:
        """One past the index of its last token."""
        return self.place + self.num_tokens


class MediaPixels(msgspec.Struct, frozen=True):
    """The pixels of an image, in the size that the model reads."""

    digest: bytes
    height: int
    width: int
    data: bytes
    """Rows of pixels, three bytes each: red, green, blue."""


class EncoderInput(msgspec.Struct, frozen=True):
    """The input of a request's encoder, whose keys its decoder attends to: a text's tokens, or rows
    of numbers such as a sound's.
    """

    digest: bytes
    """Digest of the content."""
    token_ids: list[int] = []
    rows: bytes = b""
    """Rows `[T, W]` in fp32, little-endian; empty where it is a text."""
    num_rows: int = 0
    """Number of `rows`."""

    @property
    def num_tokens(self) -> int:
        """Rows that the encoder computes."""
        return self.num_rows or len(self.token_ids)


class NewRequest(msgspec.Struct):
    """A row that the worker does not have: of a new request, or of one that returns after a
    preemption. It gets a permanent place.
    """

    request_id: str
    token_ids: list[int]
    """All tokens known so far: the prompt, and those generated before a preemption."""
    num_prompt_tokens: int
    params: RequestParams
    seed: int
    """Seed of the draws, 64 bits; an unseeded request gets one at admission."""
    sample_index: int = 0
    """Index of the row among the n samples of its prompt; part of the Philox counter."""
    end_token_ids: list[int] = []
    """Ids that end the request (end of sequence unless ignored, stop_token_ids); banned until
    `params.min_tokens` are generated.
    """
    grammar: GrammarSpec | None = None
    """Grammar of the row's text; None: any text."""
    mirostat_mu: float | None = None
    """Bound of mirostat after the last of `token_ids`; None: its first one, 2 * mirostat_tau."""
    second_start: int | None = None
    """Index of the first token of the pair's second text, where the row is a pair of texts."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: none."""
    media: list[MediaItem] = []
    """Images among its tokens, in their order."""
    encoder_input: EncoderInput | None = None
    """Input of its encoder; None for a decoder alone."""
    first_position: int = 0
    """Position of its first token, from which on its other tokens' count."""


class TableEnd(msgspec.Struct):
    """The end of a row's table, behind which the blocks were given back: they were granted for
    guesses that did not hold, or for decode steps that were not made.
    """

    request_id: str
    num_blocks: list[int]
    """Blocks that the table still has, for each cache group."""


class ScheduledRequest(msgspec.Struct):
    """The share of one row in a step: `num_tokens` tokens from position `start` on are computed."""

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: list[list[int]]
    """Block ids appended to the row's table since the last step, one list for each cache group; []
    where no group gained any.
    """
    replaced_blocks: list[tuple[int, int, int]] = []
    """Entries of the table changed by copy-on-write: (group, index in the table, new block id)."""
    program: str = "decoder"
    """Name of the model's Program that computes it."""
    wants: Wants = ""
    """Result that comes of the last of its tokens: a draw from its logits, or a pooled row."""
    num_prompt_logprobs: int | None = None
    """Number of top alternatives wanted for each of the prompt's positions; None where the prompt's
    logprobs are not wanted.
    """
    search_of: str = ""
    """Request whose beam search chooses by the row's logprobs; "" for a row that is a request
    itself.
    """
    from_device: bool = False
    """Whether its one token is still unknown here: it is drawn in the step before, and the device
    has it.
    """

    draft_ids: list[int] = []
    """Guesses of the tokens after the last known one, computed with it: a draw is made after it and
    after each guess, and holds as far as the guesses before it are what was drawn.
    """
    draft_parents: list[int] = []
    """Index of each guess's parent among them, -1: the last known token; []: each follows the one
    before. Where they branch, the paths through them are those of `draft_tree.DraftTree`.
    """
    leaf_blocks: list[list[tuple[int, int, int]]] = []
    """Entries of the table in which the paths of a guess differ from the row's, for each path but
    the first: (group, index in the table, block id).
    """

    propose: int = 0
    """Most tokens that a draft model guesses of what follows the step's draws."""
    max_num_tokens: int | None = None
    """Most tokens that a row with a grammar may come to, the prompt's included; None without one.
    """
    num_encoded: int = 0
    """Rows of its encoder's input, where the step computes them before the row's own tokens; 0
    where it has none, or an earlier step has computed it.
    """

    @property
    def owner(self) -> str:
        """The request that the row is computed for."""
        return self.search_of or self.request_id


class StepPlan(msgspec.Struct):
    """The whole of one step. The worker shortens tables, moves blocks out, frees rows, adds rows,
    moves blocks in (from the first "swap_in" on), then computes.
    """

    step: int
    freed_rows: list[str]
    new_rows: list[NewRequest]
    moves: list[BlockMove]
    rows: list[ScheduledRequest]
    connector: ConnectorPlan | None = None
    num_steps: int = 1
    """Most decode steps of the plan, each row's drawn token being its next one. More than 1 only
    where every row computes one token and draws one; `start` then advances with each step.
    """
    table_ends: list[TableEnd] = []
    """Tables that became shorter since the last plan."""
    compiles: list[GrammarSpec] = []
    """Grammars that the worker begins to compile, beside the steps."""
    adapters: list[AdapterLoad] = []
    """Adapters that the worker begins to read, beside the steps."""
    encodes: list[MediaPixels] = []
    """Images that are encoded before the step's rows, which read some of them, are computed."""
    dropped_media: list[bytes] = []
    """Digests of the images whose rows are dropped, before others are encoded."""
    joins: bool = False
    """Whether a plan without rows computes a step all the same, whose experts compute the rows of
    other engines."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, those of encoders included."""
        return sum([row.num_tokens + row.num_encoded for row in self.rows])


class TokenLogprobs(msgspec.Struct):
    """Logprobs of one position: the token's own first, then the best `k`, each with its rank (1 is
    the most likely).
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RowResult(msgspec.Struct):
    """The result of one row of a step: the tokens that it drew."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Logprobs of prompt tokens in this chunk; entry i belongs to the prompt token at `start + 1 +
    i`.
    """
    failure: str | None = None
    """Reason why this row alone failed (NaN logits, for example), with which the scheduler ends its
    request; None where it did not.
    """
    num_kept: int = 0
    """Number of the row's computed tokens whose K and V hold, counted from `start`; the request's
    computed count advances by it. 0 where the row failed.
    """
    mirostat_mu: float | None = None
    """Bound of mirostat after `token_ids`, which no tokens tell; None without mirostat."""
    pooled: bytes | None = None
    """The pooled row in fp32, little-endian; None where none was wanted."""
    draft_ids: list[int] = []
    """A draft model's guess of what follows `token_ids`."""
    draft_parents: list[int] = []
    """Index of each of `draft_ids`' parent among them, -1: the last token; []: each follows the one
    before.
    """
    kept_path: int = 0
    """Path of the row's guess whose blocks hold what is kept; the others are given up."""


class WeightArrivals(msgspec.Struct, frozen=True):
    """Sums over the weights that were read from a file while steps were computed, since the
    engine's start.
    """

    num_bytes: int = 0
    num_found: int = 0
    """Pieces of the weights that had arrived when a product asked for them."""
    num_waited: int = 0
    """Pieces of the weights that a product waited for."""
    wait_s: float = 0.0
    """Seconds in which products waited."""
    neurons_found: int = 0
    """Neurons that were in memory when a step used them."""
    neurons_read: int = 0
    """Neurons that were read for a step."""
    neurons_foreseen: int = 0
    """Neurons that were read by a guess, before a step asked for them."""
    neurons_foreseen_used: int = 0
    """Neurons that were read by a guess, and that the step then used."""

    def __add__(self, other: WeightArrivals) -> WeightArrivals:
        return WeightArrivals(
            *(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__)
        )

    def share_since(self, earlier: WeightArrivals, count: int) -> WeightArrivals:
        """Returns each one's share of what has come since earlier sums, among `count`."""
        found = {
            name: (getattr(self, name) - getattr(earlier, name)) / count
            for name in self.__struct_fields__
        }
        return WeightArrivals(
            **{name: share if name == "wait_s" else round(share) for name, share in found.items()}
        )


class StepResult(msgspec.Struct):
    """The results of a plan's rows in one step, in the plan's order, and the seconds that the
    device was busy.
    """

    step: int
    rows: list[RowResult]
    busy_s: float = 0.0
    """Seconds that the device was busy, moves included."""
    moved_s: float = 0.0
    """Seconds of `busy_s` spent moving blocks to the host and back."""
    connector: ConnectorReport | None = None
    kv_bytes: int | None = None
    """Bytes that the requests' K and V take on the device, where memory is given on demand; None
    elsewhere.
    """
    compiled: list[bytes] = []
    """Digests of the grammars whose compiling has ended since the last result."""
    adapters: list[AdapterLoaded] = []
    """Adapters whose reading has ended since the last result."""
    not_encoded: list[bytes] = []
    """Digests of images of the plan that could not be encoded."""
    weights: WeightArrivals | None = None
    """Weights read from a file so far; None where all are in memory."""
    counters: dict[str, float] | None = None
    """Counts that extensions keep, since the engine's start; None if there are none."""
