"""Interfaces of tokenizers, grammars and image readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from octavo.api.pooling_params import PairIds, TextPair
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.step import MediaContent, MediaItem


@dataclass(frozen=True, slots=True)
class Rendering:
    """Options for rendering a conversation with a chat template."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the start of an assistant message."""
    continue_final_message: bool = False
    """Whether the prompt ends inside the last message, which the model continues."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Additional template variables."""
    template: str | None = None
    """Jinja text that replaces the model's template, or the name of one of them."""
    is_foreign: bool = False
    """Whether the template comes from a client and is rendered in a separate process."""
    add_special_tokens: bool = False
    """Whether to add the tokenizer's BOS and EOS tokens to the rendered text."""
    replacements: Mapping[str, str] = field(default_factory=dict)
    """Replacements in the rendered text, for images."""


DEFAULT_RENDERING = Rendering()


@dataclass(frozen=True, slots=True)
class RoleRules:
    """Role sequences that a chat template renders without losing text, and its form of calls."""

    system: bool = True
    """Whether a system message at the start is supported."""
    developer: bool = True
    """Whether a developer message at the start is supported; otherwise it becomes a system
    message.
    """
    system_alone: bool = True
    """Whether a conversation of only a system message is supported."""
    system_anywhere: bool = True
    """Whether a system message after other messages is supported."""
    repeats: bool = True
    """Whether consecutive user or assistant messages are supported."""
    assistant_first: bool = True
    """Whether an assistant message at the start is supported."""
    user_after_tool: bool = True
    """Whether a user message directly after a tool result is supported."""
    calls_have_content: bool = True
    """Whether messages with calls have text content, possibly empty; otherwise their content is
    null.
    """
    arguments_are_objects: bool = True
    """Whether call arguments are objects; otherwise they are JSON text."""


class Matcher(Protocol):
    """The state of one output in a grammar."""

    def copy(self) -> Matcher:
        """Returns an independent copy."""
        ...

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Advances by tokens; raises an error if one is not legal."""
        ...

    def allows(self, token_id: int) -> bool: ...

    def try_accept(self, token_id: int) -> bool:
        """Advances by a token if it is legal; returns whether it was."""
        ...

    def rollback(self) -> None:
        """Reverts the last token of `try_accept`."""
        ...

    def mask(self) -> bytes:
        """Returns a bit per token, lowest first: whether it may come next. Includes end tokens if
        the text is complete.
        """
        ...

    def only_token(self) -> int | None:
        """Returns the only legal next token; None if there are several, or if determining it would
        require a mask.
        """
        ...

    def closing(self, most: int) -> list[int] | None:
        """Returns a short completion of at most `most` tokens including an end token; None if there
        is none.
        """
        ...

    def likely_tokens(self) -> list[int]:
        """Returns the tokens of the forced next text as a tokenizer would split it; other splits
        may be legal too. Empty if several texts may follow.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may come next."""
        ...


class Grammars(Protocol):
    """Compiles grammars for the model's vocabulary. Implemented by `text/grammar`."""

    def compile(self, spec: GrammarSpec) -> Matcher:
        """Returns a matcher at the start of the grammar. Thread-safe."""
        ...

    def num_bytes(self, spec: GrammarSpec) -> int:
        """Returns the estimated memory of a compiled grammar."""
        ...

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        """Returns the masks of several matchers, computed without the GIL; None for matchers whose
        `mask` would raise an error.
        """
        ...


class Tokenizer(Protocol):
    """Converts text to token ids and back. Implemented by `text/tokenizer.py`."""

    eos_token_ids: tuple[int, ...]
    special_token_ids: frozenset[int]
    """Ids that `skip_special_tokens` skips."""
    vocab_size: int

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_text: bool = False
    ) -> list[int]:
        """Encodes a text.

        Special token text is plain text unless `allow_special_text`. Thread-safe; long texts do not
        block other threads.
        """
        ...

    def encode_pair(
        self, pair: TextPair, *, max_tokens: int | None = None, template: str | None = None
    ) -> PairIds:
        """Encodes two texts.

        Uses the chat template if it has query and document roles, else `template`, else the
        tokenizer's special tokens. Special token text is plain text. Beyond `max_tokens`, a
        template's document is truncated, otherwise the longer text first.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Returns a lower bound of the token count without tokenizing; 0 if unknown."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def find_token(self, text: str) -> int | None:
        """Returns the id of the token with this spelling; None if there is none."""
        ...

    def token_text(self, token_id: int) -> str:
        """Returns a readable form of a token, as in logprobs."""
        ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Returns a token's bytes; empty for ids without a token.

        A text is the concatenation of its tokens' bytes in UTF-8.
        """
        ...

    @property
    def named_special_tokens(self) -> Mapping[str, str]:
        """Special token texts by template variable name: bos_token, eos_token."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja chat template; None if it has none."""
        ...

    def get_role_rules(self, rendering: Rendering) -> RoleRules:
        """Returns the role sequences that a rendering's template supports."""
        ...

    @property
    def tool_chat_template(self) -> str | None:
        """Chat template for conversations with tools; None if there is none."""
        ...

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        """Names of the chat templates that a request may choose."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the model's chat template reads."""
        ...

    @property
    def infill_format(self) -> str | None:
        """Name of the fill-in-the-middle format; None if the model has none."""
        ...

    def infill(self, prefix: str, suffix: str) -> list[int]:
        """Returns a fill-in-the-middle prompt; raises InvalidRequest if the vocabulary does not
        support it.
        """
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = DEFAULT_RENDERING
    ) -> str:
        """Renders a conversation as text."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Renders and encodes a conversation; special token text in messages is plain text.

        `check` is called with the rendered text before tokenizing and may raise an error.
        """
        ...


MediaKind = Literal["image", "video", "audio", "embeds"]

MEDIA_TYPES: Mapping[str, str] = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
"""A media type of each kind, for error messages."""

MEDIA_PLURALS: Mapping[str, str] = {"image": "images", "video": "videos", "audio": "audio"}


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """A preprocessed image, video or audio: its parts, and the tokens that represent them."""

    token_ids: list[int]
    """Tokens that replace the placeholder token."""
    media: list[MediaItem]
    """The parts, such as an image's views, and their ranges in `token_ids`."""
    pixels: list[MediaContent]
    kind: MediaKind = "image"


@dataclass(frozen=True, slots=True)
class VideoSource:
    """A video of a request, before it is read."""

    video: Any
    """URL or bytes of a file, or a list of frames: Pillow images or arrays."""
    fps: float | None = None
    """Frames per second of a list of frames; None: the rate at which the model samples."""


@dataclass(frozen=True, slots=True)
class AudioSource:
    """An audio of a request, before it is read."""

    audio: Any
    """URL, path or bytes of a file, or samples from -1 to 1: an array, or (array, rate in Hz)."""


@dataclass(frozen=True, slots=True)
class PrefixPrompt:
    """Form of a prompt with images whose tokens all attend to one another (PaliGemma)."""

    begin: str
    """Special token between the last image and the text."""
    end: str
    """Text after the prompt's."""
    max_tokens: int
    """Most tokens of such a prompt, which one step computes."""


class EmbedsReader(Protocol):
    """Reads prompt embeddings. Implemented by `media/prompt_embeds.py`."""

    def read(self, source: object) -> DecodedMedia:
        """Returns the embeddings as the media that replaces their placeholder tokens."""
        ...


class MediaReader(Protocol):
    """Reads images, videos and audio of requests. Implemented by `media/prompt_media.py`."""

    @property
    def token_ids(self) -> Mapping[MediaKind, int]:
        """Placeholder tokens of the kinds of media that the model reads."""
        ...

    @property
    def replacements(self) -> Mapping[str, str]:
        """Placeholder texts of a medium in a prompt, and their replacements, each of which contains
        the token once.
        """
        ...

    @property
    def prefix(self) -> PrefixPrompt | None:
        """Form of prompts with images; None: their text tokens are causal."""
        ...

    def read(self, sources: Sequence[Any]) -> list[DecodedMedia]:
        """Reads images from paths, URLs or bytes, videos from `VideoSource` and audio from
        `AudioSource`; raises InvalidRequest for an invalid one.
        """
        ...
