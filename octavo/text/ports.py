"""The protocols of what reads prompts and writes answers: tokenizers, grammars, images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.api.pooling_params import PairIds, TextPair
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.step import MediaPixels


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
    """Jinja text in place of the model's template, or the name of one of the model's."""
    is_foreign: bool = False
    """Whether it is a text that comes from a client, and is rendered in a process of its own."""
    add_special_tokens: bool = False
    """Whether the tokenizer's own first and last tokens are added to what the template writes."""
    replacements: Mapping[str, str] = field(default_factory=dict)
    """Texts that the template writes, and those that take their places (an image's)."""


DEFAULT_RENDERING = Rendering()


@dataclass(frozen=True, slots=True)
class RoleRules:
    """Sequences of roles that a chat template renders without leaving any text out, and the form in
    which it takes calls.
    """

    system: bool = True
    """A system message at the beginning."""
    developer: bool = True
    """A developer's message at the beginning; otherwise it is a system message."""
    system_alone: bool = True
    """A system message without any other."""
    late_system: bool = True
    """A system message after others."""
    repeats: bool = True
    """Several messages of the user or of the assistant in a row."""
    assistant_first: bool = True
    """An assistant's message at the beginning."""
    user_after_tool: bool = True
    """A user's message right after a tool's result."""
    calls_have_content: bool = True
    """A message with calls has a text, be it empty; otherwise its content is null."""
    arguments_are_objects: bool = True
    """Arguments of calls are objects; otherwise JSON text."""


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

    def get_role_rules(self, rendering: Rendering) -> RoleRules:
        """Returns the sequences of roles that the template of a rendering takes."""
        ...

    @property
    def tool_chat_template(self) -> str | None:
        """The chat template of conversations with tools; None without one."""
        ...

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        """Names of the model's chat templates that a request may choose."""
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
