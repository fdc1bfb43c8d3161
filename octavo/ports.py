"""The protocols through which one part of Octavo meets another without importing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from octavo.errors import OctavoError
from octavo.outputs import Profile
from octavo.step import (
    BlockKey,
    BlockMove,
    BlockName,
    ConnectorPlan,
    ConnectorReport,
    ConnectorStats,
    RowResult,
    StepPlan,
    StepResult,
)

Between = Callable[[Sequence[RowResult]], bool]
"""Told what a decode step yielded after which its plan has another; False: it is not to be
computed. Never raises.
"""


class Executor(Protocol):
    """Runs steps. `engine/core.py` knows only this; `worker/worker.py` is one."""

    def execute(self, plan: StepPlan, between: Between | None = None) -> StepResult:
        """Never raises for the fault of a single row: that row's result carries `failure`. The
        result holds all steps' tokens.
        """
        ...

    @property
    def progress(self) -> int:
        """Changes as a step gets ahead; read by another thread while it is computed. One that
        stands still for long hangs.
        """
        ...

    def close(self) -> None: ...


class Launched(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Waits for it. Raises what computing it raised."""
        ...


@runtime_checkable
class AsyncExecutor(Executor, Protocol):
    """One that takes the next step before the one before has come back. They are computed in the
    order of their launches.
    """

    def launch(self, plan: StepPlan) -> Launched:
        """Returns as soon as it can; the rows that are `from_device` take what the step before
        draws.
        """
        ...


@runtime_checkable
class Losable(Protocol):
    """An executor that may become useless by itself, at any time. `worker/ranks/ranked_worker.py`
    is one.
    """

    def when_lost(self, tell: Callable[[OctavoError], None]) -> None:
        """`tell` is called once, from another thread, when that is so; at once where it has
        been."""
        ...


class Profiler(Protocol):
    """Times the ops of steps. `worker/worker.py` is one."""

    def start_profile(self) -> None:
        """BackendUnavailable where the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class Connector(Protocol):
    """The scheduler half of a place outside the device where KV blocks live: host memory, disk,
    another worker. Knows names, no byte.

    Every block passes through a slot of host memory. What the connector decides leaves as moves and
    as a ConnectorPlan; what became of it comes back in a ConnectorReport. `engine/connector.py` is
    one.
    """

    @property
    def reaches(self) -> bool:
        """Whether there is anything to be asked at all."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made for its sake, though no request runs."""
        ...

    def has(self, group: int, key: BlockKey) -> bool:
        """Whether the next step can load the block."""
        ...

    def can_fetch(self, group: int, key: BlockKey) -> bool:
        """Whether it can be there after some steps, or is there. It may fail then."""
        ...

    def fetch(self, request_id: str, wanted: Iterable[tuple[int, BlockKey]]) -> bool:
        """Brings blocks near, in this order, and keeps them for the request; False where nothing
        has to be waited for.
        """
        ...

    def has_fetched(self, request_id: str) -> bool: ...

    def is_waiting(self, request_id: str) -> bool: ...

    def release(self, request_id: str) -> None:
        """The request has started or ended; one that never fetched is left alone."""
        ...

    def may_load(self, places: Sequence[tuple[int, int]]) -> bool:
        """Whether this step may still load blocks at these places, (group, index), without keeping
        others waiting.
        """
        ...

    def load(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        """Of a block that is there."""
        ...

    def touch(self, group: int, keys: Iterable[BlockKey]) -> None:
        """They were found and used."""
        ...

    def offer(self, group: int, key: BlockKey) -> None:
        """The device has a full block of that name; whether it is saved is the connector's
        choice."""
        ...

    def forget(self, group: int, keys: Iterable[BlockKey]) -> None: ...

    def reset(self) -> None:
        """Forgets everything."""
        ...

    def knows(self, name: BlockName) -> bool:
        """Whether it is kept beyond the engine's life, or will be."""
        ...

    def pin(self, names: Sequence[BlockName], *, until: float, now: float) -> None:
        """Keeps them until then, in seconds since 1970, or no longer; InvalidRequest where they are
        too many.
        """
        ...

    def begin_step(self, find: Callable[[int, BlockKey], int | None]) -> list[BlockMove]:
        """Moves that come before all others; `find` says which block of the device has a name."""
        ...

    def end_step(self) -> ConnectorPlan | None: ...

    def step_done(self, report: ConnectorReport | None) -> None: ...

    def step_failed(self) -> None:
        """Nobody knows how far its moves were made."""
        ...

    def snapshot(self) -> ConnectorStats: ...


class ConnectorWorker(Protocol):
    """The worker half: the bytes in the slots, and what goes on behind them while steps compute.
    `worker/connectors/tiers.py` is one.
    """

    def slot(self, group: int, slot: int) -> Any:
        """The bytes of one slot, `[KvLayout.block_bytes] uint8`, to be read or written."""
        ...

    def begin(self, plan: ConnectorPlan) -> None:
        """Once the moves of the step are made. Returns at once."""
        ...

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        """What became of it since the last report; waits so long for the first thing to tell."""
        ...

    def close(self) -> None:
        """Ends what goes on behind the slots, given a little time."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. `text/tokenizer.py` is one."""

    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    """What `skip_special_tokens` leaves out of texts."""
    vocab_size: int

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_text: bool = False
    ) -> list[int]:
        """Returns the ids of a text. Where `allow_special_text` is False, text that spells a
        special token stays text. Threads may encode at the same time; a long text does not keep
        others from running.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has at least, found without tokenizing it; 0
        where none is known.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """One token for a person to read (logprobs)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """A text is its tokens' bytes end to end, in UTF-8. Empty for ids without a token."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation; special-token text inside a message stays text.
        `check` is called with the rendered text before it is tokenized, to refuse it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary as GGUF headers hold it; index = token id, texts in UTF-8 as the file has them.

    `model`: "gpt2" (byte-level BPE with `merges`, texts cut first as `pre` names) or "llama"
    (SentencePiece's BPE by `scores`). `types`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5
    unused, 6 byte.
    """

    model: str
    pre: str
    tokens: Sequence[bytes]
    types: Sequence[int]
    merges: Sequence[bytes] = ()
    scores: Sequence[float] = ()
    add_space_prefix: bool = True


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What a checkpoint says of its tokenizer, as plain data: the path of a tokenizer.json, or a
    vocabulary.
    """

    origin: Path
    """The file it stands in, for messages."""
    json: Path | None = None
    vocabulary: Vocabulary | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    """What chat templates know by name: bos_token, eos_token, ..."""
    eos_token_ids: tuple[int, ...] = ()
    add_bos_token: bool | None = None
    """None: as tokenizer.json's own post-processor has it."""
    chat_template: str | None = None


class ModelHeader(Protocol):
    """What a model on disk says of itself before any weight is read."""

    path: Path

    config: dict[str, Any]
    """config.json, or what a GGUF header says in the same words."""
    generation_config: dict[str, Any]

    def format_of(self, name: str) -> str:
        """How a tensor is stored, by GGUF's names: F32, BF16, Q4_K ..."""
        ...


class Checkpoint(ModelHeader, Protocol):
    """A model on disk, read lazily. Tensors go by the family's safetensors names and row orders,
    whatever the file is.
    """

    output_major: bool
    """Every matrix is `[out, in]`, those too that the family's safetensors keep as `[in, out]`
    (Weight.transposed).
    """

    weight_files: Sequence[Path]
    """Which together hold every tensor."""

    def names(self) -> Collection[str]: ...

    def tokenizer_source(self) -> TokenizerSource | None:
        """None where the checkpoint holds no tokenizer."""
        ...

    def tensor(self, name: str) -> Any:
        """A `quant.blocks.StoredWeight`, mapped from the file where its layout allows."""
        ...

    def release(self) -> None:
        """Memory that shows the files' bytes is given back until they are read again: it would
        count as this process's.
        """
        ...
