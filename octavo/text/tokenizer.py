"""Tokenizer and chat templates of a model, over the `tokenizers` package; one class for
tokenizer.json files and GGUF vocabularies.

Adds special token handling in user text, BOS rules, end ids and chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import tokenizers

from octavo.api.errors import ConfigError, InvalidRequest, WeightMismatch
from octavo.api.pooling_params import PairIds, TextPair
from octavo.checkpoint.ports import TokenizerSource
from octavo.config.paths import expand_path, path_exists
from octavo.text.chat_template import ChatTemplate, ChatTemplates
from octavo.text.encoding import make_special, without_special_tokens
from octavo.text.end_tokens import find_end_tokens
from octavo.text.infill import InfillFormat, find_infill_format
from octavo.text.length_bound import LengthBound
from octavo.text.pair import cut_pair, cut_second, encode_texts, pair_messages, reads_pairs
from octavo.text.ports import DEFAULT_RENDERING, Rendering, RoleRules
from octavo.text.special_text import Guard, SpecialText
from octavo.text.template_process import render_apart
from octavo.text.token_bytes import TokenBytes, format_token
from octavo.text.unicode import LONG_TEXT_CHARACTERS, check_unicode
from octavo.text.vocabulary import build_tokenizer


def load_tokenizer(
    source: TokenizerSource, *, chat_template: str | None = None, strict: bool = False
) -> TextTokenizer:
    """Reads a model's tokenizer.

    `chat_template` replaces the model's template: Jinja text, a file path, or the name of one of
    the model's templates. With `strict` an unknown pre-tokenizer raises UnsupportedModel.
    """
    templates = _templates(source, chat_template)
    if source.vocabulary is not None:
        built = build_tokenizer(source.vocabulary, source.origin, strict=strict)
        adds_bos = built.adds_bos if source.add_bos_token is None else source.add_bos_token
        return TextTokenizer(
            built.tokenizer, source, templates, space_prefix=built.space_prefix, adds_bos=adds_bos
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(source.json))
    except Exception as error:  # the package raises no more specific error
        raise WeightMismatch(
            f"{source.json}: not a readable tokenizer: {error}",
            hint="download the file again",
        ) from error
    return TextTokenizer(tokenizer, source, templates, adds_bos=source.add_bos_token)


class TextTokenizer:
    """A model's tokenizer and chat templates. Thread-safe. Implements `Tokenizer`."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        source: TokenizerSource,
        templates: ChatTemplates,
        *,
        space_prefix: bool = False,
        adds_bos: bool | None = None,
    ) -> None:
        """`space_prefix` adds a space before each text (SentencePiece's dummy prefix). `adds_bos`
        controls the BOS token; None leaves it to the post-processor.
        """
        # A tokenizer.json may enable truncation or padding, which must not apply to prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = source.special_tokens
        self._templates = templates
        self._space_prefix = space_prefix
        self._adds_bos = adds_bos
        self._has_type_ids = source.has_type_ids
        self._bos_id = self._get_id("bos_token")
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        eos_id = self._get_id("eos_token")
        self.eos_token_ids = find_end_tokens(
            {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()},
            [*source.eos_token_ids, *([] if eos_id is None else [eos_id])],
        )
        make_special(tokenizer, self.eos_token_ids)
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special_text: bool = False
    ) -> list[int]:
        if not text.isascii():
            check_unicode(text)
        if self._space_prefix:
            text = self._with_space(text, after_special=allow_special_text)
        ids = self._encode(
            text, add_special_tokens=add_special_tokens, allow_special_text=allow_special_text
        )
        if not add_special_tokens or self._adds_bos is None or self._bos_id is None:
            return ids
        starts_with_bos = (
            bool(ids)
            and ids[0] == self._bos_id
            and not (allow_special_text and text.startswith(self._special_tokens["bos_token"]))
        )
        if self._adds_bos and not starts_with_bos:
            return [self._bos_id, *ids]
        return ids[1:] if starts_with_bos and not self._adds_bos else ids

    def encode_pair(
        self, pair: TextPair, *, max_tokens: int | None = None, template: str | None = None
    ) -> PairIds:
        check_unicode(pair.first)
        check_unicode(pair.second)
        if reads_pairs(self.chat_template):
            template = self.chat_template
        if template == "":
            raise InvalidRequest(
                "prompt: the model has no template for a query and a document",
                hint="set one with --chat-template that supports the roles 'query' and 'document'",
                param="prompt",
            )
        if template is not None:
            return self._templated_pair(pair, template, max_tokens)
        first, second = pair.first, pair.second
        if self._space_prefix:
            first = self._with_space(first, after_special=False)
            second = self._with_space(second, after_special=False)
        encoding = encode_texts(self._plain_tokenizer, first, second)
        ids = cut_pair(encoding, max_tokens, pair.max_second_tokens)
        return ids if self._has_type_ids else ids._replace(type_ids=[0] * len(ids.type_ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids; invalid UTF-8 becomes U+FFFD."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join(self._bytes[i] for i in token_ids if i not in skipped).decode(
            errors="replace"
        )
        strips = self._space_prefix or self._bytes.strips_space
        return text.removeprefix(" ") if strips else text

    def fewest_tokens(self, text: str) -> int:
        return self._length_bound.fewest_tokens(text)

    def find_token(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """Returns a readable form of a token; incomplete characters as byte values."""
        return format_token(self._bytes[token_id])

    @property
    def has_chat_template(self) -> bool:
        return self._templates.default.exists

    @property
    def named_special_tokens(self) -> Mapping[str, str]:
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        return self._templates.default.source

    @property
    def tool_chat_template(self) -> str | None:
        return self._templates.with_tools.source

    @property
    def chat_template_names(self) -> tuple[str, ...]:
        return tuple(self._templates.named)

    def get_role_rules(self, rendering: Rendering) -> RoleRules:
        """Returns the role sequences that a rendering's template supports; all of them for a
        client's own template.
        """
        return RoleRules() if rendering.is_foreign else self._choose_template(rendering).role_rules

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the model's chat templates read."""
        return self._templates.default.variables | self._templates.with_tools.variables

    @cached_property
    def infill_format(self) -> str | None:
        return None if self._infill is None else self._infill.name

    def infill(self, prefix: str, suffix: str) -> list[int]:
        """Returns a fill-in-the-middle prompt; special token text is plain text."""
        if self._infill is None:
            raise InvalidRequest(
                "suffix: the model's vocabulary has no fill-in-the-middle tokens",
                hint="remove suffix, or use a model made for infilling, such as Qwen2.5-Coder",
                param="suffix",
            )
        check_unicode(prefix, "prompt")
        check_unicode(suffix, "suffix")
        starts, _ = self._special_ends
        parts = {
            "prefix": self._encode(prefix, add_special_tokens=False, allow_special_text=False),
            "suffix": self._encode(suffix, add_special_tokens=False, allow_special_text=False),
        }
        return [*starts, *self._infill.arrange(parts["prefix"], parts["suffix"])]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = DEFAULT_RENDERING
    ) -> str:
        guard = self._special_text.guard()
        return guard.reveal(self._render(messages, rendering, guard))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Renders and encodes a conversation; special token text in messages or variables is plain
        text.

        Without such text, the rendered text is encoded as a whole. `check` is called with the
        rendered text before tokenizing.
        """
        guard = self._special_text.guard()
        rendered = self._render(messages, rendering, guard)
        for old, new in rendering.replacements.items():
            rendered = rendered.replace(old, new)
        if check is not None:
            check(guard.reveal(rendered))
        starts, ends = self._special_ends if rendering.add_special_tokens else ([], [])
        return [*starts, *self._rendered_ids(rendered, guard), *ends]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], rendering: Rendering, guard: Guard
    ) -> str:
        """Renders the conversation with user strings protected."""
        template = self._choose_template(rendering)
        render = partial(render_apart, template) if rendering.is_foreign else template.render
        protected = guard.protect(list(messages))
        variables = guard.protect(rendering.variables)
        if not rendering.continue_final_message:
            return render(protected, rendering.add_generation_prompt, variables)
        protected[-1] = {**protected[-1], "content": protected[-1]["content"] + guard.end_mark}
        rendered = render(protected, False, variables)
        end = rendered.rfind(guard.end_mark)
        if end < 0:
            raise InvalidRequest(
                "continue_final_message: the chat template drops the text of the last message",
                hint="send the complete prompt to /v1/completions",
                param="continue_final_message",
            )
        return rendered[:end].replace(guard.end_mark, "")

    def _choose_template(self, rendering: Rendering) -> ChatTemplate:
        has_tools = rendering.variables.get("tools") is not None
        return self._templates.choose(rendering.template, has_tools=has_tools)

    def _templated_pair(self, pair: TextPair, template: str, max_tokens: int | None) -> PairIds:
        """Encodes a pair through a template, truncating the document if necessary."""
        rendering = Rendering(template=template)
        pair = cut_second(self._plain_tokenizer, pair)
        ids = self.apply_chat_template(pair_messages(pair), rendering)
        num_fixed = 0
        if max_tokens is not None and len(ids) > max_tokens:
            guard = self._special_text.guard()
            messages = guard.protect(pair_messages(pair))
            messages[-1]["content"] += guard.end_mark
            rendered = self._templates.choose(template).render(messages, True, {})
            start, mark, end = rendered.rpartition(guard.end_mark)
            if not mark:
                raise InvalidRequest(
                    "prompt: the chat template for pairs changes the end of the document"
                )
            last = self._rendered_ids(end, guard)
            ids = [*self._rendered_ids(start, guard)[: max(0, max_tokens - len(last))], *last]
            empty = pair_messages(replace(pair, second=""))
            num_fixed = len(self.apply_chat_template(empty, rendering))
        return PairIds(ids, [0] * len(ids), num_fixed)

    def _rendered_ids(self, rendered: str, guard: Guard) -> list[int]:
        if not guard.used:
            return self.encode(rendered, add_special_tokens=False, allow_special_text=True)
        ids: list[int] = []
        for part in guard.split(rendered):
            if isinstance(part, int):
                ids.append(part)
            else:
                text = f" {part}" if self._space_prefix else part
                ids += self._encode(text, add_special_tokens=False, allow_special_text=False)
        return ids

    @cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer adds before and after every text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        num_more = len(whole) - len(plain)
        for start in range(num_more + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return [], []

    @cached_property
    def _infill(self) -> InfillFormat | None:
        return find_infill_format(self._tokenizer.token_to_id)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Function that returns the bytes of a token; b"" for an id without a token."""
        return self._bytes.__getitem__

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound(self._tokenizer)

    @cached_property
    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        """Tokenizer that treats special token text as plain text."""
        return without_special_tokens(self._tokenizer)

    @cached_property
    def _special_text(self) -> SpecialText:
        added = self._tokenizer.get_added_tokens_decoder()
        return SpecialText({i: token for i, token in added.items() if token.special})

    def _encode(
        self, text: str, *, add_special_tokens: bool, allow_special_text: bool
    ) -> list[int]:
        """Encodes with the `tokenizers` package, without adding BOS tokens or spaces."""
        tokenizer = self._tokenizer if allow_special_text else self._plain_tokenizer
        ids: list[int] = encode_text(tokenizer, text, add_special_tokens=add_special_tokens).ids
        return ids

    def _with_space(self, text: str, *, after_special: bool) -> str:
        """Adds a space before the text's first word, after leading special tokens."""
        start = self._special_text.leading(text) if after_special else 0
        return f"{text[:start]} {text[start:]}" if len(text) > start else text

    def _get_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)


def _templates(source: TokenizerSource, option: str | None) -> ChatTemplates:
    """Returns a model's chat templates, with the option `chat_template` added, or selected by
    it.
    """

    def template(text: str | None) -> ChatTemplate:
        return ChatTemplate(text, source.special_tokens)

    named = {name: template(text) for name, text in source.named_templates.items()}
    default = template(source.chat_template)
    if default.exists:
        named["default"] = default
    if option is None:
        return ChatTemplates(default, named.get("tool_use", default), named)
    chosen = named[option] if option in named else template(_read_template(option, named))
    return ChatTemplates(chosen, chosen, named)


def _read_template(option: str, names: Collection[str]) -> str:
    """Returns the option if it is a template, otherwise the contents of the file."""
    if "{" in option or "\n" in option:
        return option
    path = expand_path(option)
    if not path_exists(path) or not path.is_file():
        own = [f"the model's templates {', '.join(map(repr, names))}"] if names else []
        allowed = ["a Jinja template", *own, "the path of a file with one"]
        raise ConfigError(f"chat_template: got {option!r}, expected {' or '.join(allowed)}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template: {path} cannot be read: {error}",
            hint="give the path of a Jinja file, or a name from the model's tokenizer_config.json",
        ) from error


def encode_text(
    tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool = False
) -> tokenizers.Encoding:
    """Encodes a text; the result has character offsets only for short texts."""
    if len(text) <= LONG_TEXT_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    # Only the package's batch calls release the GIL.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
