"""Converts prompts to token ids: texts, ids, dicts, conversations.

Owns the accepted formats of prompts and the limit on their length before tokenization. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.api.errors import ContextTooLong, InvalidRequest, did_you_mean, shown
from octavo.api.sampling_options import whole_number
from octavo.engine.protocol.prompt_limits import AdmissionDecision, AllocStatus, PromptLimits
from octavo.frontend.arguments import Messages, Prompt, as_list, check_messages
from octavo.frontend.encoder_inputs import EncoderInputs
from octavo.frontend.media import (
    EMBEDS,
    KEY,
    MediaInputs,
    PromptWithMedia,
    extract_media,
    get_media,
)
from octavo.frontend.params_resolver import need_tokenizer
from octavo.text.ports import Rendering, Tokenizer
from octavo.text.unicode import LONG_TEXT_CHARACTERS, check_unicode

TEXT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
PROMPT_KEYS = (*TEXT_KEYS, KEY, EMBEDS)
TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Maximum number of prompt tokens, and the side from which excess tokens are removed."""

    max_tokens: int
    side: Literal["left", "right"] = "left"
    """Side from which tokens are removed."""


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Converts prompts to token ids; raises InvalidRequest or ContextTooLong."""

    tokenizer: Tokenizer | None
    limits: PromptLimits
    media: MediaInputs
    encoder: EncoderInputs | None
    """Builds encoder inputs; None for a decoder-only model."""

    def read_prompt(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        may_be_long: bool = False,
        keys: Sequence[str] = PROMPT_KEYS,
    ) -> tuple[str | None, list[int], str]:
        """Returns a prompt's text (None if it has none), its token ids and its cache salt. `keys`:
        accepted keys of a dict.
        """
        text = None
        salt = ""
        has_images = False
        if isinstance(prompt, Mapping):
            has_images = bool(get_media(prompt))
            text, prompt, salt = self._open_dict(prompt, keys)
        if isinstance(prompt, str):
            if not may_be_long:
                self.check_length(prompt)
            written = self.media.replaced(prompt) if has_images else prompt
            ids = self._encode_prompt(written, add_special_tokens=add_special_tokens)
            return prompt, ids, salt
        token_ids = as_list(prompt)
        if token_ids is None:
            raise InvalidRequest(
                f"prompt: got {type(prompt).__name__}, expected a string, token ids, or a dict"
                " with one of them",
                param="prompt",
            )
        return text, to_int_ids(token_ids), salt

    def _encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = need_tokenizer(
            self.tokenizer, "a text prompt requires a tokenizer, and this engine has none", "prompt"
        )
        return tokenizer.encode(
            text, add_special_tokens=add_special_tokens, allow_special_text=True
        )

    def encode_plain(self, text: str) -> list[int]:
        """Returns a text's tokens without special tokens around it."""
        return self._encode_prompt(text, add_special_tokens=False)

    def check_length(self, *texts: str) -> None:
        """Rejects texts that are too long for any prompt, before spending seconds on tokenizing
        them.
        """
        if self.tokenizer is None or max(map(len, texts)) <= LONG_TEXT_CHARACTERS:
            return
        min_tokens = sum(map(self.tokenizer.fewest_tokens, texts))
        if self.encoder is not None:
            self.encoder.check_length(min_tokens, at_least=True)
            return
        check_can_start(self.limits.judge(min_tokens, at_least=True))

    def read_media(self, prompt: Prompt, token_ids: Sequence[int]) -> PromptWithMedia | None:
        """Returns a prompt with the tokens of its media, or of its embeddings; None without any."""
        if not isinstance(prompt, Mapping):
            return None
        if prompt.get(EMBEDS) is not None:
            embeds = self.media.read_embeds(prompt[EMBEDS])
            return PromptWithMedia(embeds.token_ids, embeds.media, embeds.pixels)
        images = get_media(prompt)
        return self.media.placed(token_ids, images) if images else None

    def _open_dict(
        self, prompt: Mapping[str, Any], keys: Sequence[str]
    ) -> tuple[str | None, str | Sequence[int], str]:
        """Returns the contents of a prompt's dict: the text of its token ids (None if not given),
        the prompt, and the cache salt.
        """
        for key in prompt:
            if key not in keys:
                raise InvalidRequest(
                    f"prompt: got the key {key!r}, expected {', '.join(keys)}",
                    hint=did_you_mean(str(key), keys),
                    param="prompt",
                )
        text: Any = prompt.get("prompt")
        token_ids: Any = prompt.get("prompt_token_ids")
        if prompt.get(EMBEDS) is not None:
            for key in ("prompt_token_ids", KEY):
                if prompt.get(key) is not None:
                    raise InvalidRequest(
                        f"{key}: got it with {EMBEDS}, expected one of them", param=key
                    )
            token_ids = ()
        if text is None and token_ids is None:
            raise InvalidRequest(
                "prompt: got a dict without a prompt, expected one of prompt, prompt_token_ids",
                param="prompt",
            )
        if isinstance(token_ids, str):
            raise InvalidRequest(
                "prompt_token_ids: got a string, expected token ids",
                hint="pass a string as prompt",
                param="prompt",
            )
        if token_ids is not None and text is not None and not isinstance(text, str):
            raise InvalidRequest(
                f"prompt: got {shown(text)} with prompt_token_ids, expected the same text",
                param="prompt",
            )
        salt = prompt.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise InvalidRequest(f"cache_salt: got {salt!r}, expected a string", param="cache_salt")
        check_unicode(salt, "cache_salt")
        return (None, text, salt) if token_ids is None else (text, token_ids, salt)

    def chat_prompt(
        self, messages: Messages, rendering: Rendering, truncation: Truncation | None = None
    ) -> dict[str, Any]:
        """Renders a conversation as a prompt of token ids."""
        tokenizer = self._check_conversation(messages, rendering)
        check = self.check_length if truncation is None else None
        messages, sources = extract_media(messages)
        if not sources:
            token_ids = tokenizer.apply_chat_template(messages, rendering, check=check)
            return {"prompt_token_ids": _truncate(token_ids, truncation)}
        if truncation is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: not supported with images",
                hint="shorten the text",
                param="truncate_prompt_tokens",
            )
        images = self.media.read(sources)
        rendering = replace(rendering, replacements=self.media.replacements)
        token_ids = tokenizer.apply_chat_template(messages, rendering, check=check)
        return {"prompt_token_ids": token_ids, KEY: {"image": images}}

    def render_chat(self, messages: Messages, rendering: Rendering) -> str:
        """Renders a conversation as text."""
        return self._check_conversation(messages, rendering).render_chat(messages, rendering)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> dict[str, Any]:
        """Returns a prompt with its token ids; raises ContextTooLong if it cannot fit."""
        if isinstance(prompt, Mapping) and prompt.get(EMBEDS) is not None:
            return {**prompt, EMBEDS: self.media.read_embeds(prompt[EMBEDS])}
        text, token_ids, salt = self.read_prompt(
            prompt, add_special_tokens=add_special_tokens, may_be_long=truncation is not None
        )
        cut = _truncate(token_ids, truncation)
        return {
            "prompt": text if len(cut) == len(token_ids) else None,
            "prompt_token_ids": cut,
            "cache_salt": salt,
        }

    def infill_prompt(self, prefix: str, suffix: str) -> dict[str, Any]:
        """Returns the fill-in-the-middle prompt for the text between a prefix and a suffix."""
        tokenizer = need_tokenizer(self.tokenizer, "suffix: strings require a tokenizer", "suffix")
        self.check_length(prefix)
        self.check_length(suffix)
        return {"prompt_token_ids": tokenizer.infill(prefix, suffix)}

    def _check_conversation(self, messages: Messages, rendering: Rendering) -> Tokenizer:
        """Raises InvalidRequest for conversations that no template can render; returns the
        tokenizer with the template.
        """
        messages = check_messages(messages)
        for name in rendering.variables:
            if name in TEMPLATE_ARGUMENTS:
                message = f"chat_template_kwargs: got {name!r}, which is a separate field"
                raise InvalidRequest(message, param="chat_template_kwargs")
        if rendering.continue_final_message:
            _check_continued(messages, rendering)
        return need_tokenizer(
            self.tokenizer,
            "a conversation requires the model's tokenizer and chat template",
            "prompt",
        )


def to_int_ids(token_ids: list[Any]) -> list[int]:
    """Returns token ids as Python ints; converts NumPy integers."""
    if set(map(type, token_ids)) <= {int}:  # fast path, 100x faster
        return list(token_ids)
    numbers = list(map(whole_number, token_ids))
    for number, token in zip(numbers, token_ids, strict=True):
        if number is None:
            raise InvalidRequest(
                f"prompt: got {shown(token)} among token ids, expected integers",
                param="prompt",
            )
    return [number for number in numbers if number is not None]


def _truncate(token_ids: list[int], truncation: Truncation | None) -> list[int]:
    if truncation is None or len(token_ids) <= truncation.max_tokens:
        return token_ids
    if truncation.side == "right":
        return token_ids[: truncation.max_tokens]
    return token_ids[len(token_ids) - truncation.max_tokens :]


def _check_continued(messages: Messages, rendering: Rendering) -> None:
    """Raises InvalidRequest unless the last message, which is to be continued, is an assistant's
    text.
    """
    name = "continue_final_message"
    if rendering.add_generation_prompt:
        raise InvalidRequest(
            f"{name}: got true with add_generation_prompt true, expected one of them",
            param=name,
        )
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise InvalidRequest(
            f"{name}: the last message has the role {shown(last.get('role'))}, expected the role"
            " 'assistant' and a string as its content",
            param=name,
        )


def check_can_start(decision: AdmissionDecision) -> None:
    """Raises ContextTooLong for a prompt that can never start."""
    if decision.status is AllocStatus.NEVER:
        raise ContextTooLong(
            decision.reason,
            hint=decision.hint,
            param="prompt",
            num_tokens=decision.num_tokens,
            max_tokens=decision.max_tokens,
        )
