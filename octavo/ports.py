"""The protocols through which one part of Octavo meets another without importing it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from octavo.outputs import Profile
from octavo.step import StepPlan, StepResult


class Executor(Protocol):
    """Runs steps. `engine/core.py` knows only this; `worker/worker.py` is one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Never raises for the fault of a single row: that row's result carries `failure`."""
        ...

    def close(self) -> None: ...


class Profiler(Protocol):
    """Times the ops of steps. `worker/worker.py` is one."""

    def start_profile(self) -> None:
        """BackendUnavailable where the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class Tokenizer(Protocol):
    """Text to ids and back. `text/tokenizer.py` is one."""

    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    """What `skip_special_tokens` leaves out of texts."""
    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special_text: bool = False) -> list[int]:
        """Ids of a text. Where `allow_special_text` is False, text that spells a special token stays text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """One token for a person to read (logprobs)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """A text is its tokens' bytes end to end, in UTF-8. Empty for ids without a token."""
        ...

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of a conversation; special-token text inside a message stays text."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary as GGUF headers hold it; index = token id, texts in UTF-8 as the file has them.

    `model`: "gpt2" (byte-level BPE with `merges`, texts cut first as `pre` names) or "llama" (SentencePiece's BPE by `scores`).
    `types`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
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
    """What a checkpoint says of its tokenizer, as plain data: the path of a tokenizer.json, or a vocabulary."""

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


class Checkpoint(Protocol):
    """A model on disk, read lazily. Tensors go by the family's safetensors names and row orders, whatever the file is."""

    path: Path

    config: dict[str, Any]
    """config.json, or what a GGUF header says in the same words."""
    generation_config: dict[str, Any]

    output_major: bool
    """Every matrix is `[out, in]`, those too that the family's safetensors keep as `[in, out]` (Weight.transposed)."""

    def names(self) -> Collection[str]: ...

    def tokenizer_source(self) -> TokenizerSource | None:
        """None where the checkpoint holds no tokenizer."""
        ...

    def tensor(self, name: str) -> Any:
        """A `quant.packed.PackedWeight`, mapped from the file where its layout allows."""
        ...
