"""Protocols of a model on disk, and its tokenizer as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Side = Literal["left", "right"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Token types of `Vocabulary.types`; control tokens are never matched in text."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary as in GGUF headers: the index is the token id, texts are UTF-8.

    `model` is "gpt2", "gemma4" or "whitespace" (BPE with `merges`, after the pre-tokenizer `pre`),
    "llama" (SentencePiece BPE with `scores`), "t5" (SentencePiece unigram) or "bert" (WordPiece
    with words that start with a space). `types` are 1 normal, 2 unknown, 3 control, 4 user-defined,
    5 unused, 6 byte.
    """

    model: str
    pre: str
    """Name of the pre-tokenizer; empty if the header has none."""
    tokens: Sequence[bytes]
    types: Sequence[int]
    merges: Sequence[bytes] = ()
    scores: Sequence[float] = ()
    add_space_prefix: bool = True
    prefixes_segments: bool = False
    """Whether the space is also added to each text after a special token ("llama" in GGUF)."""
    prefix: tuple[str, ...] = ()
    """Tokens before every text, in place of the bos token (ChatGLM, BERT)."""
    suffix: tuple[str, ...] = ()
    """Tokens after every text."""
    charsmap: bytes = b""
    """Normalization of a unigram model, as compiled by SentencePiece."""
    removes_spaces: bool = True
    """Whether a unigram model merges runs of spaces."""
    lowercase: bool | None = None
    """Whether texts are lower-cased ("bert", "whitespace"); None for the model's default."""
    strips_accents: bool | None = None
    """Whether accents are removed ("bert"); None: the same as `lowercase`."""
    stripped_sides: Mapping[bytes, Side] = field(default_factory=dict)
    """Side of special tokens on which white space is stripped, by token text."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A checkpoint's tokenizer as plain data: the path of a tokenizer.json, or a vocabulary."""

    origin: Path
    """Source file, for error messages."""
    json: Path | None = None
    vocabulary: Vocabulary | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens available to chat templates: bos_token, eos_token, ..."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text, the main one first."""
    add_bos_token: bool | None = None
    """Whether texts begin with bos_token; None leaves it to tokenizer.json's post-processor."""
    has_type_ids: bool = True
    """Whether the model has token type ids for text pairs."""
    chat_template: str | None = None
    """The default chat template, or the only one."""
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Further chat templates by name, such as `tool_use` and `rag`."""


class ModelHeader(Protocol):
    """Description of a model on disk, without its weights."""

    path: Path

    config: dict[str, Any]
    """Contents of config.json, or a GGUF header converted to it."""
    has_config_file: bool
    """Whether `config` was read from config.json, so every key in it was set on purpose."""
    generation_config: dict[str, Any]

    def get_format(self, name: str) -> str:
        """Returns a tensor's format by GGUF's names: F32, BF16, Q4_K ..."""
        ...


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    """Name in `Checkpoint.names()`."""
    shape: tuple[int, ...]
    file: Path
    num_stacked: int = 0
    """Number of experts in the tensor, if this is one expert's matrix in it."""
    is_quantized: bool = False
    """Whether a quantized format stores it; its matrices are `[out, in]` in every family."""


@runtime_checkable
class Checkpoint(ModelHeader, Protocol):
    """A model on disk, read lazily. Tensors have the safetensors names and row orders of the family
    in every file format.
    """

    output_major: bool
    """Whether every matrix is `[out, in]`, even if the family's safetensors store it as `[in, out]`
    (Weight.transposed).
    """

    weight_files: Sequence[Path]
    """Files that together contain every tensor."""

    def names(self) -> Collection[str]: ...

    def stored(self, name: str) -> StoredTensor:
        """Returns a tensor's file and shape; raises WeightMismatch if it is missing."""
        ...

    def tokenizer_source(self) -> TokenizerSource | None:
        """Returns the tokenizer; None if the checkpoint contains none."""
        ...

    def tensor(self, name: str) -> Any:
        """Returns a `quant.blocks.StoredWeight`, memory-mapped if its layout allows."""
        ...

    def release(self) -> None:
        """Releases resident pages of the mapped files; otherwise they count as this process's
        memory.
        """
        ...
