"""Checks sampling and stop options against the model: ids within its vocabulary, logprobs within
the engine's limit; converts texts to tokens.

SamplingParams checks ranges that do not depend on the model. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from octavo.api.errors import InvalidRequest, shown
from octavo.api.sampling_params import SamplingParams
from octavo.text.ports import Tokenizer
from octavo.text.unicode import check_unicode


class ParamsResolver:
    """Checks the SamplingParams of one model's requests; raises InvalidRequest."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_logprobs: int,
        tokenizer: Tokenizer | None,
        processors: Sequence[str] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._tokenizer = tokenizer
        self._processors = processors
        self._breakers = DrySequenceBreakers(tokenizer, vocab_size)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Checks the params against the model and returns a copy of them.

        The model-independent checks are repeated, since fields may have been changed after
        construction.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params: got {shown(params)}, expected SamplingParams",
                param="sampling_params",
            )
        params = msgspec.structs.replace(params)
        for name in ("stop", "bad_words"):
            for text in getattr(params, name) or ():
                check_unicode(text, name)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            if getattr(params, name):
                self.check_ids(name, getattr(params, name))
        if params.logprobs is not None and params.logprob_token_ids is None:
            self._check_logprobs("logprobs", params.logprobs)
        if params.prompt_logprobs is not None:
            self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        for name in ("stop", "stop_regex"):
            if getattr(params, name):
                words = f"{name}: stop strings require a tokenizer, and this engine has none"
                need_tokenizer(self._tokenizer, words, name)
        if params.logits_processors:
            self._check_processors(params.logits_processors)
        if params.dry_multiplier:
            params.dry_sequence_breaker_ids = self._breakers.ids(params.dry_sequence_breakers)
        if params.bad_words:
            return msgspec.structs.replace(
                params, bad_words_token_ids=self._encode_bad_words(params.bad_words)
            )
        return params

    def check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"{name}: got the token id {token}, expected 0 to {self._vocab_size - 1}",
                    param=name,
                )

    def _check_processors(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._processors:
                known = ", ".join(self._processors) or "none"
                raise InvalidRequest(
                    f"logits_processors: got {shown(name)}, expected the engine's: {known}",
                    hint="available functions are set by the engine option logits_processors",
                    param="logits_processors",
                )

    def _check_logprobs(self, name: str, value: int) -> None:
        num_logprobs = self._vocab_size if value == -1 else value
        if num_logprobs > self._max_logprobs:
            whole = f" (the whole vocabulary, {num_logprobs})" if value == -1 else ""
            message = f"{name}: got {value}{whole}, expected at most {self._max_logprobs}"
            raise InvalidRequest(
                message, hint="this limit is set by the engine option max_logprobs", param=name
            )

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Returns the token ids of each word: at the start of a text, and after a space."""
        tokenizer = need_tokenizer(
            self._tokenizer,
            "bad_words: strings require a tokenizer, and this engine has none",
            "bad_words",
        )
        encodings: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                encodings[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        return [list(token_ids) for token_ids in encodings if token_ids]


def need_tokenizer(tokenizer: Tokenizer | None, message: str, param: str) -> Tokenizer:
    """Returns the engine's tokenizer; raises InvalidRequest with `message` if it has none."""
    if tokenizer is None:
        raise InvalidRequest(
            message,
            hint="pass prompts as token ids, or start the engine without skip_tokenizer_init",
            param=param,
        )
    return tokenizer


NAME = "dry_sequence_breakers"

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Default sequence breakers; those of llama.cpp."""
MAX_KEPT = 16
"""Maximum number of lists of sequence breakers whose tokens are cached."""


class DrySequenceBreakers:
    """Finds the tokens that contain sequence breakers, in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._found = lru_cache(maxsize=MAX_KEPT)(self._find)

    def ids(self, texts: list[str] | None) -> list[int]:
        """Returns the tokens that contain one of `texts`; None: the default texts. Returns [] for
        the default texts without a tokenizer.
        """
        if self._tokenizer is None and texts:
            raise InvalidRequest(
                f"{NAME}: strings require a tokenizer, and this engine has none",
                param=NAME,
                hint="send token ids, or start the engine without skip_tokenizer_init",
            )
        for text in texts or ():
            check_unicode(text, NAME)
        parts = DEFAULT_BREAKERS if texts is None else tuple(dict.fromkeys(texts))
        return list(self._found(parts))

    def _find(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        breakers = [text.encode() for text in texts]
        if self._tokenizer is None:
            return ()
        held = (self._tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size))
        return tuple(
            token_id for token_id, text in enumerate(held) if any(part in text for part in breakers)
        )
