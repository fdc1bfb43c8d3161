"""Validates inputs of encoder-decoder models.

The prompt's tokens are the encoder's input; the decoder begins with tokens from the model's config
or from the request. Works on token ids only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from octavo.api.errors import ContextTooLong, InvalidRequest
from octavo.engine.protocol.step import EncoderInput

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Builds the inputs of one model's encoder."""

    decoder_prompt: tuple[int, ...]
    """Default tokens that the decoder begins with; () if the model's config defines none."""
    max_tokens: int
    """Maximum length of an encoder input, in tokens."""
    hears: bool = False
    """Whether the encoder's input is audio instead of text."""

    def from_tokens(self, token_ids: list[int]) -> EncoderInput:
        """Returns the encoder input for a text; raises ContextTooLong if it is too long for the
        encoder.
        """
        if self.hears:
            raise InvalidRequest(
                "prompt: got a string, but the model transcribes audio",
                hint="send an audio file to /v1/audio/transcriptions, or to LLM.transcribe",
                param="prompt",
            )
        self.check_length(len(token_ids))
        digest = blake2b(array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
        return EncoderInput(digest, token_ids)

    def check_length(self, num_tokens: int, *, at_least: bool = False) -> None:
        """Raises ContextTooLong if an input of `num_tokens` tokens is too long. `at_least`: the
        actual number may be higher.
        """
        if num_tokens > self.max_tokens:
            got = f"{'at least ' if at_least else ''}{num_tokens}"
            raise ContextTooLong(
                f"This model's encoder accepts {self.max_tokens} tokens, the prompt has {got};"
                f" expected at most {self.max_tokens}",
                hint="shorten the text, or split it",
                param="prompt",
                num_tokens=num_tokens,
                max_tokens=self.max_tokens,
            )

    def prompt_of(self, named_ids: Sequence[int] | None) -> list[int]:
        """Returns the tokens that the decoder begins with: the request's `named_ids` or, if None,
        the model's.
        """
        if named_ids is None:
            named_ids = self.decoder_prompt
        if not named_ids:
            raise InvalidRequest(
                "decoder_prompt_token_ids: got none, and the model's config has no"
                " decoder_start_token_id; expected at least one token",
                hint="set the tokens that the decoder starts with",
                param="prompt",
            )
        return list(named_ids)
