"""A request that generates one sequence: each drawn token is handed out, until one ends it.

Implements `ResultConsumer`. Owns the rules of the end that token ids alone decide (end of sequence,
stop tokens, length); stop strings are the front's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.api.repetition_detection import REPETITION_FOUND, RepetitionDetection
from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.step import RowResult, Wants
from octavo.engine.requests.result_consumer import RequestProgress
from octavo.engine.requests.sequence_state import Finish, SequenceState

GRAMMAR = "a grammar: what may come next depends on the tokens before"


@dataclass(frozen=True, slots=True)
class EndRules:
    """When a token ends a request. Numbers of tokens include the prompt."""

    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """End of sequence and stop tokens together."""
    num_prompt_tokens: int
    min_num_tokens: int
    """Tokens before which none of `end_token_ids` ends it."""
    max_num_tokens: int
    one_token: bool = False
    """Whether it ends as aborted once it has one more token."""
    repetition: RepetitionDetection | None = None

    def end_of(self, token_ids: Sequence[int]) -> Finish | None:
        """Returns how a request of these tokens ends with the last of them; None where it goes
        on.
        """
        last = token_ids[-1]
        if last in self.end_token_ids and len(token_ids) >= self.min_num_tokens:
            return Finish("stop", None if last in self.eos_token_ids else last)
        if len(token_ids) >= self.max_num_tokens:
            return Finish("length")
        if self.repeats(token_ids):
            return Finish("repetition", REPETITION_FOUND)
        return Finish("abort") if self.one_token else None

    def repeats(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the answer has fallen into a loop, and may end."""
        if self.repetition is None or len(token_ids) < self.min_num_tokens:
            return False
        return self.repetition.holds_for(token_ids, self.num_prompt_tokens)


class PlainGeneration:
    """The consumer of one sampled sequence. It holds no tokens: they are the row's."""

    wants: Wants = "draw"
    reads_logprobs = False
    num_seqs = 1
    beams: tuple[SequenceState, ...] = ()

    def __init__(
        self, params: SamplingParams, rules: EndRules, *, has_grammar: bool = False
    ) -> None:
        self.row_params = params
        self.needs_last_token = GRAMMAR if has_grammar else _needs_last_token(params)
        self.may_branch = not (self.needs_last_token or _follows_tokens(params))
        self._rules = rules
        # A processor is a user's function: it is called for no text that may never come.
        self.may_draft = not (rules.one_token or params.logits_processors)
        self.samples_sequentially = params.mirostat_mode > 0
        self._may_end_anywhere = rules.one_token or rules.repetition is not None
        """Whether a token may end it that is no end token, before its length does."""
        self._watched = rules.one_token or (has_grammar and params.min_tokens > 0)
        """Whether something has to be done for each of its tokens."""

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        self._rules = replace(self._rules, max_num_tokens=max_num_tokens)

    def num_plain_draws(self, num_tokens: int) -> int:
        """Returns the tokens up to its length, or up to where the worker must be told that end
        tokens are no longer banned (min_tokens).
        """
        if self._watched:
            return 1
        num_banned = self._rules.min_num_tokens - num_tokens
        num_left = self._rules.max_num_tokens - num_tokens
        return min(num_left, num_banned) if num_banned > 0 else num_left

    def take(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress:
        """Adds the drawn tokens to the row, up to the one that ends the request."""
        known, drawn, rules = row.token_ids, result.token_ids, self._rules
        num_before = len(known)
        finish = None
        for token_id in drawn:
            known.append(token_id)
            may_end = token_id in rules.end_token_ids or len(known) >= rules.max_num_tokens
            if may_end or self._may_end_anywhere:
                finish = rules.end_of(known)
                if finish is not None:
                    break
        if result.mirostat_mu is not None:
            row.mirostat_mu = result.mirostat_mu
        num_taken = len(known) - num_before
        return RequestProgress(
            num_taken,
            drawn[:num_taken],
            result.logprobs and result.logprobs[:num_taken],
            is_first=num_before == rules.num_prompt_tokens,
            finish=finish,
        )

    def start_over(self, token_ids: list[int]) -> list[int]:
        return token_ids


def _follows_tokens(params: SamplingParams) -> bool:
    """Returns whether what is added to logits changes with each token; a device does its part for
    the last one itself.
    """
    is_penalised = (
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )
    words = params.bad_words_token_ids
    bans_words = words is not None and any(len(word) > 1 for word in words)
    return bool(is_penalised or params.dry_multiplier or bans_words)


def _needs_last_token(params: SamplingParams) -> str:
    if params.dry_multiplier and params.dry_allowed_length == 1:
        return "DRY from the first token on: any token may be a repetition"
    if params.dry_multiplier and params.logit_bias:
        return "DRY and logit_bias: a penalty and a bias are added up before they are rounded"
    if params.mirostat_mode:
        return "mirostat: its bound depends on the token before"
    return ""
