"""The protocols through which one part of Octavo meets another without importing it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from octavo.step import StepPlan, StepResult


class Executor(Protocol):
    """Runs steps. `engine/core.py` knows only this; `worker/worker.py` is one."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Never raises for the fault of a single row: that row's result carries `failure`."""
        ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to ids and back. `text/tokenizer.py` is one."""

    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special_text: bool = False) -> list[int]:
        """Ids of a text. Where `allow_special_text` is False, text that spells a special token stays text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """One token for a person to read (logprobs)."""
        ...

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of a conversation; special-token text inside a message stays text."""
        ...


class Checkpoint(Protocol):
    """A model on disk, read lazily. Tensors go by the family's safetensors names and row orders, whatever the file is."""

    config: dict[str, Any]
    """config.json, or what a GGUF header says in the same words."""
    generation_config: dict[str, Any]

    def names(self) -> Collection[str]: ...

    def tensor(self, name: str) -> Any:
        """A `quant.packed.PackedWeight`, mapped from the file where its layout allows."""
        ...
