"""The protocols through which one part of Octavo meets another without importing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from octavo.errors import OctavoError
from octavo.outputs import Profile
from octavo.pooling_params import PairIds, TextPair
from octavo.step import (
    BlockKey,
    BlockMove,
    BlockName,
    ConnectorPlan,
    ConnectorReport,
    ConnectorStats,
    MediaPixels,
    RowResult,
    StepPlan,
    StepResult,
)
from octavo.structured_outputs import GrammarSpec

Between = Callable[[Sequence[RowResult]], bool]
"""Called between two decode steps of a plan with the results of the first; False ends the plan
there. It never raises.
"""


class Executor(Protocol):
    """Runs steps. The core knows only this; `worker/worker.py` implements it."""

    def execute(self, plan: StepPlan, between: Between | None = None) -> StepResult:
        """Carries out a plan; the result holds all steps' tokens. The fault of a single row does
        not raise: that row's result carries `failure`.
        """
        ...

    @property
    def progress(self) -> int:
        """A number that changes as a step advances, read by another thread while it is computed. A
        step whose number stands still for long hangs.
        """
        ...

    def close(self) -> None: ...


class Launched(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result; raises what computing it raised."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """An executor that takes the next step before the one before has come back. Steps are computed
    in the order of their launches.
    """

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step and returns as soon as it can; rows that are `from_device` take what the
        step before draws.
        """
        ...


@runtime_checkable
class Losable(Protocol):
    """An executor that may become useless by itself, at any time. `worker/ranks/ranked_worker.py`
    implements it.
    """

    def when_lost(self, tell: Callable[[OctavoError], None]) -> None:
        """Calls `tell` once, from another thread, when the executor is lost; at once where it is
        lost already.
        """
        ...


class Profiler(Protocol):
    """Times the ops of steps. `worker/worker.py` implements it."""

    def start_profile(self) -> None:
        """Begins to time ops; raises BackendUnavailable where the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class Connector(Protocol):
    """The scheduler half of a store outside the device where KV blocks live: host memory, disk,
    another worker. Knows names, no byte.

    Every block passes through a slot of host memory. What the connector decides leaves as moves and
    as a ConnectorPlan; the outcome comes back in a ConnectorReport. `engine/kv/tier_connector.py`
    implements it.
    """

    @property
    def reaches(self) -> bool:
        """Whether the store can hold anything at all."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made for its sake, though no request runs."""
        ...

    def has(self, group: int, key: BlockKey) -> bool:
        """Returns whether the next step can load the block."""
        ...

    def can_fetch(self, group: int, key: BlockKey, source: str = "") -> bool:
        """Returns whether the block is near or can be brought near in some steps, which may fail.
        `source` is the address of an engine that computes it; "" where there is none.
        """
        ...

    def fetch(
        self, request_id: str, wanted: Iterable[tuple[int, BlockKey]], source: str = ""
    ) -> bool:
        """Prefetches blocks in this order and holds them for the request; returns False where none
        has to be waited for.
        """
        ...

    def has_fetched(self, request_id: str) -> bool: ...

    def is_waiting(self, request_id: str) -> bool: ...

    def release(self, request_id: str) -> None:
        """Lets go of the blocks held for a request, which has started or ended; one that never
        fetched is left alone.
        """
        ...

    def may_load(self, places: Sequence[tuple[int, int]]) -> bool:
        """Returns whether this step may still load blocks at these places, (group, index), without
        keeping others waiting.
        """
        ...

    def load(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        """Returns the move that loads a block which is near."""
        ...

    def touch(self, group: int, keys: Iterable[BlockKey]) -> None:
        """Notes that blocks were found and used."""
        ...

    def offer(self, group: int, key: BlockKey) -> None:
        """Notes that the device has a full block of that name; the connector chooses whether to
        save it.
        """
        ...

    def complete(self, names: Iterable[BlockName]) -> None:
        """Notes that a prompt which was computed for another engine has ended: of these blocks
        those that the device has are saved, and the others never will be.
        """
        ...

    def forget(self, group: int, keys: Iterable[BlockKey]) -> None: ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def knows(self, name: BlockName) -> bool:
        """Returns whether the block is kept beyond the engine's life, or will be."""
        ...

    def pin(self, names: Sequence[BlockName], *, until: float, now: float) -> None:
        """Keeps blocks stored until a time, in seconds since 1970, which replaces an earlier one;
        raises InvalidRequest where they are too many.
        """
        ...

    def begin_step(self, find: Callable[[int, BlockKey], int | None]) -> list[BlockMove]:
        """Returns the moves that come before all others of the step; `find` returns the device's
        block of a name.
        """
        ...

    def end_step(self) -> ConnectorPlan | None: ...

    def step_done(self, report: ConnectorReport | None) -> None: ...

    def step_failed(self) -> None:
        """Forgets what the oldest step was to do: its moves may have been made or not."""
        ...

    def snapshot(self) -> ConnectorStats: ...


class ConnectorWorker(Protocol):
    """The worker half of a connector: the bytes in the slots, and the work behind them while steps
    compute. `worker/connectors/tiers.py` implements it.
    """

    def slot(self, group: int, slot: int) -> Any:
        """Returns the bytes of one slot, `[KvLayout.block_bytes] uint8`, to be read or written."""
        ...

    def begin(self, plan: ConnectorPlan) -> None:
        """Begins the work of a plan once the moves of its step are made; returns at once."""
        ...

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        """Returns the outcome since the last report; waits at most `wait_s` seconds for the first
        thing to tell.
        """
        ...

    def close(self) -> None:
        """Ends the work behind the slots, within a little time."""
        ...


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a chat template turns a conversation into a prompt."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an assistant's message."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last message, which the model then continues."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template beside what it always gets."""
    template: str | None = None
    """Jinja text in place of the model's template."""
    is_foreign: bool = False
    """Whether that text comes from a client, and is rendered in a process of its own."""
    add_special_tokens: bool = False
    """Whether the tokenizer's own first and last tokens are added to what the template writes."""
    replacements: Mapping[str, str] = field(default_factory=dict)
    """Texts that the template writes, and those that take their places (an image's)."""


DEFAULT_RENDERING = Rendering()


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as the model reads it, and the tokens that stand for it."""

    pixels: MediaPixels
    num_tokens: int
    grid: tuple[int, int]
    """Rows and columns in which the tokens lie on the image."""
    is_whole: bool
    """Whether the tokens see one another."""


class ImageReader(Protocol):
    """Reads the images that users send. `media/reader.py` implements it."""

    @property
    def token_id(self) -> int:
        """Token that stands for each row of an image."""
        ...

    @property
    def replacements(self) -> Mapping[str, str]:
        """Texts that stand for an image in a prompt, and what is written in their places, which
        holds the token once.
        """
        ...

    def read(self, sources: Sequence[Any]) -> list[ReadImage]:
        """Returns the images that a user names by path, URL or bytes; InvalidRequest says what is
        wrong with one.
        """
        ...


class Matcher(Protocol):
    """One answer's way through a grammar, token by token."""

    def copy(self) -> Matcher:
        """Returns a matcher at the same place, which goes on by itself."""
        ...

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on by tokens; raises where one is not legal."""
        ...

    def allows(self, token_id: int) -> bool:
        """Returns whether a token may come next."""
        ...

    def take_legal(self, token_id: int) -> bool:
        """Goes on by a token where it may come next; returns whether it may."""
        ...

    def take_back(self) -> None:
        """Goes back by the last token that `take_legal` took."""
        ...

    def mask(self) -> bytes:
        """Returns a bit for each token of the vocabulary, the lowest first: whether it may come
        next. End tokens may where the text is a whole one.
        """
        ...

    def only_token(self) -> int | None:
        """Returns the one token that may come next; None where several may, or where that would
        take a mask to tell.
        """
        ...

    def closing(self, most: int) -> list[int] | None:
        """Returns at most `most` tokens, an end token the last, that complete the text by a short
        way; None where none is found.
        """
        ...

    def likely_tokens(self) -> list[int]:
        """Returns tokens that spell the text that alone may come next, as a tokenizer would; other
        tokens may spell it too. None where several texts may come.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token may come next."""
        ...


class Grammars(Protocol):
    """Compiles grammars over the model's vocabulary. `text/grammar` implements it."""

    def compile(self, spec: GrammarSpec) -> Matcher:
        """Returns a matcher at the beginning of the grammar's text; any thread may call it."""
        ...

    def num_bytes(self, spec: GrammarSpec) -> int:
        """Returns about how much memory a compiled grammar takes."""
        ...

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        """Returns the masks of several of its matchers, made on threads that leave the interpreter
        to others; None for one whose own `mask` tells the fault.
        """
        ...


class Tokenizer(Protocol):
    """Turns text to ids and back. `text/tokenizer.py` implements it."""

    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out of texts."""
    vocab_size: int

    @property
    def has_chat_template(self) -> bool:
        """Whether it renders conversations."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_text: bool = False
    ) -> list[int]:
        """Returns the ids of a text. Where `allow_special_text` is False, text that spells a
        special token stays text. Threads may encode at the same time; a long text does not keep
        others from running.
        """
        ...

    def encode_pair(
        self, pair: TextPair, *, max_tokens: int | None = None, template: str | None = None
    ) -> PairIds:
        """Returns the ids of two texts: as the chat template writes a query and a document, where
        it knows these roles, else as `template` does, else with the tokenizer's special tokens
        around them. Text that spells a special token stays text.

        Beyond `max_tokens` a template's document is cut, else the longer text first.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has at least, found without tokenizing it; 0
        where none is known.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """Returns one token for a person to read, as in logprobs."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, empty for ids without one. A text is the bytes of its
        tokens end to end, in UTF-8.
        """
        ...

    @property
    def named_special_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the names that chat templates know: bos_token, eos_token."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, a Jinja text; None without one."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables that the model's chat template reads; none without a template."""
        ...

    @property
    def infill_format(self) -> str | None:
        """Name of the fill-in-the-middle format that the vocabulary has tokens for; None without
        one.
        """
        ...

    def infill(self, prefix: str, suffix: str) -> list[int]:
        """Returns the ids that ask for the text between two texts; InvalidRequest where the
        vocabulary has no tokens for that.
        """
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = DEFAULT_RENDERING
    ) -> str:
        """Returns a conversation as the chat template writes it."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation; text in a message that spells a special token stays
        text. `check` is called with the rendered text before it is tokenized, to refuse it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary as GGUF headers hold it: the index is the token id, texts are in UTF-8 as in the
    file.

    `model` is "gpt2" (byte-level BPE with `merges`, texts cut first as `pre` names) or "llama"
    (SentencePiece's BPE by `scores`). `types` are 1 normal, 2 unknown, 3 control, 4 user-defined, 5
    unused, 6 byte.
    """

    model: str
    pre: str
    tokens: Sequence[bytes]
    types: Sequence[int]
    merges: Sequence[bytes] = ()
    scores: Sequence[float] = ()
    add_space_prefix: bool = True
    prefix: tuple[str, ...] = ()
    """Tokens that go before every text, in place of the bos token (ChatGLM)."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The tokenizer of a checkpoint as plain data: the path of a tokenizer.json, or a
    vocabulary.
    """

    origin: Path
    """File that the data come from, for messages."""
    json: Path | None = None
    vocabulary: Vocabulary | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that chat templates know by name: bos_token, eos_token, ..."""
    eos_token_ids: tuple[int, ...] = ()
    add_bos_token: bool | None = None
    """Whether a text begins with bos_token; None leaves it to tokenizer.json's own
    post-processor.
    """
    has_type_ids: bool = True
    """Whether the model is told which of two texts a token belongs to."""
    chat_template: str | None = None


class ModelHeader(Protocol):
    """The description of a model on disk, known before any weight is read."""

    path: Path

    config: dict[str, Any]
    """Contents of config.json, or of a GGUF header in the same words."""
    has_config_file: bool
    """Whether `config` was read from config.json, so that each of its keys was meant."""
    generation_config: dict[str, Any]

    def format_of(self, name: str) -> str:
        """Returns how a tensor is stored, by GGUF's names: F32, BF16, Q4_K ..."""
        ...


class StoredTensor(NamedTuple):
    """A tensor as a file holds it."""

    name: str
    """Name among `Checkpoint.names()`."""
    shape: tuple[int, ...]
    file: Path
    num_stacked: int = 0
    """Number of experts in the tensor where this is a matrix of one of them."""
    is_quantized: bool = False
    """Whether a quantised format holds it, whose matrices are `[out, in]` in every family."""


@runtime_checkable
class Checkpoint(ModelHeader, Protocol):
    """A model on disk, read lazily. Tensors have the family's safetensors names and row orders in
    every file format.
    """

    output_major: bool
    """Whether every matrix is `[out, in]`, those too that the family's safetensors keep as `[in,
    out]` (Weight.transposed).
    """

    weight_files: Sequence[Path]
    """Files that together hold every tensor."""

    def names(self) -> Collection[str]: ...

    def stored(self, name: str) -> StoredTensor:
        """Returns where a tensor is and its shape; raises WeightMismatch where it is missing."""
        ...

    def tokenizer_source(self) -> TokenizerSource | None:
        """Returns the tokenizer as plain data; None where the checkpoint holds none."""
        ...

    def tensor(self, name: str) -> Any:
        """Returns a `quant.blocks.StoredWeight`, mapped from the file where its layout allows."""
        ...

    def release(self) -> None:
        """Gives back memory that shows the files' bytes until they are read again; it would count
        as this process's.
        """
        ...
