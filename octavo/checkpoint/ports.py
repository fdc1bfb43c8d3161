"""The protocols of a model on disk, and its tokenizer as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Side = Literal["left", "right"]
"""Side of a special token."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Token types of `Vocabulary.types`; no text spells a control token."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary as GGUF headers hold it: the index is the token id, texts are in UTF-8 as in the
    file.

    `model` is "gpt2", "gemma4" or "whitespace" (BPE with `merges`, texts split first as `pre`
    names), "llama" (SentencePiece's BPE by `scores`), "t5" (its unigram model) or "bert"
    (WordPiece, whose words begin with a space). `types` are 1 normal, 2 unknown, 3 control, 4
    user-defined, 5 unused, 6 byte.
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
    """Whether the space goes before each text behind a special token, too ("llama" in GGUF)."""
    prefix: tuple[str, ...] = ()
    """Tokens that go before every text, in place of the bos token (ChatGLM, BERT)."""
    suffix: tuple[str, ...] = ()
    """Tokens that go behind every text."""
    charsmap: bytes = b""
    """Normalisation of a unigram model, as SentencePiece compiles it."""
    removes_spaces: bool = True
    """Whether runs of spaces are one for a unigram model."""
    lowercase: bool | None = None
    """Whether texts become lower case ("bert", "whitespace"); None for the model's default."""
    strips_accents: bool | None = None
    """Whether accents are removed ("bert"); None: as `lowercase`."""
    stripped_sides: Mapping[bytes, Side] = field(default_factory=dict)
    """Side of special tokens on which white space is removed, by the tokens' texts."""


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
    """Ids that the files name as ends of a text, the main one first."""
    add_bos_token: bool | None = None
    """Whether a text begins with bos_token; None leaves it to tokenizer.json's own
    post-processor.
    """
    has_type_ids: bool = True
    """Whether the model is told which of two texts a token belongs to."""
    chat_template: str | None = None
    """The default chat template, or the only one."""
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Further chat templates by their names, as `tool_use` and `rag`."""


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
