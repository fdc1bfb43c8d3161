"""What a user passes in, checked once and turned into EngineRequests; a user's fault ends here and
nowhere deeper.

Owns the limits of the model (context, vocabulary, logprobs) and the seeds of unseeded requests.
Knows no queue and no block.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec

from octavo.engine.requests.request import EngineRequest
from octavo.engine.scheduling.admission import PromptLimits, Verdict
from octavo.errors import ContextTooLong, InvalidRequest
from octavo.ports import Tokenizer
from octavo.sampling_params import SamplingParams
from octavo.text.unicode import check_unicode

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text; token ids; {"prompt": text} or {"prompt_token_ids": ids}, with a "cache_salt" if wished.
"""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""One conversation: [{"role": "user", "content": "..."}, ...]"""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against."""

    vocab_size: int
    prompts: PromptLimits
    max_logprobs: int


@dataclass(slots=True)
class FrontRequest:
    """A user's request: what it asks for, and one EngineRequest for each of its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[EngineRequest]
    arrival_time: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asks, and how urgently: lower priorities go first, a fair policy shares among tenants."""

    priority: int = 0
    tenant: str = ""


ANYONE = Origin()


class InputProcessor:
    """Prompts and params in, FrontRequests out; InvalidRequest or ContextTooLong says what is
    wrong.
    """

    def __init__(
        self,
        *,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int],
        seed: int,
        scheduling_policy: str = "fcfs",
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self._eos_token_ids = [
            token for token in dict.fromkeys(eos_token_ids) if token < limits.vocab_size
        ]
        self._seed = seed
        self._scheduling_policy = scheduling_policy
        self._num_requests = 0
        self._core_ids = itertools.count()
        """Never used twice: the last words about a request that was aborted must not reach one that
        took its name.
        """

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, origin: Origin = ANYONE
    ) -> FrontRequest:
        self._check_origin(origin)
        text, token_ids, salt = self._read_prompt(prompt)
        self._check_prompt(token_ids)
        self._check_beams(len(token_ids), params)
        params = self._resolve_params(params)
        _check_prompt_logprob_start(params.prompt_logprob_start, len(token_ids))
        arrival_time = time.monotonic()
        first = EngineRequest(
            str(next(self._core_ids)),
            token_ids,
            params,
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
            cache_salt=salt,
            priority=origin.priority,
            tenant=origin.tenant,
            arrival_time=arrival_time,
        )
        return FrontRequest(
            request_id, text, token_ids, params, _samples(first, params), arrival_time
        )

    def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """A conversation as a prompt of token ids. `variables` are the template's, beside what it
        always gets.
        """
        for name in variables or ():
            if name in TEMPLATE_ARGUMENTS:
                message = f"chat_template_kwargs: got {name!r}, which has a field of its own"
                raise InvalidRequest(message, param="chat_template_kwargs")
        tokenizer = self._need_tokenizer(
            "a conversation needs the model's tokenizer and chat template", "prompt"
        )
        return {
            "prompt_token_ids": tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, variables=variables
            )
        }

    # -- prompts -----------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """Text if there is one, token ids, cache salt."""
        salt = ""
        if isinstance(prompt, Mapping):
            salt, prompt = self._open_dict(prompt)
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer(
                "a text prompt needs a tokenizer, and this engine has none", "prompt"
            )
            return prompt, tokenizer.encode(prompt, allow_special_text=True), salt
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | str):
            raise InvalidRequest(
                f"prompt: got {type(prompt).__name__}, allowed are a text, token ids, or a dict"
                " of one",
                param="prompt",
            )
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(
                    f"prompt: got {token!r} among token ids, allowed are whole numbers",
                    param="prompt",
                )
        return None, list(prompt), salt

    def _open_dict(self, prompt: Mapping[str, Any]) -> tuple[str, str | Sequence[int]]:
        for key in prompt:
            if key not in PROMPT_KEYS:
                raise InvalidRequest(
                    f"prompt: got the key {key!r}, allowed are {', '.join(PROMPT_KEYS)}",
                    param="prompt",
                )
        given = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not given:
            raise InvalidRequest(
                "prompt: got a dict without a prompt, needed is one of prompt, prompt_token_ids",
                param="prompt",
            )
        if isinstance(prompt.get("prompt_token_ids"), str):
            raise InvalidRequest(
                "prompt_token_ids: got a text, allowed are token ids",
                hint="a text is given as prompt",
                param="prompt",
            )
        salt = prompt.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise InvalidRequest(f"cache_salt: got {salt!r}, allowed is a text", param="cache_salt")
        check_unicode(salt, "cache_salt")
        return salt, prompt[given[0]]

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt: got no token, needed is at least one", param="prompt")
        answer = self.limits.prompts.judge(len(token_ids))
        if answer.verdict is Verdict.NEVER:
            raise ContextTooLong(answer.reason, hint=answer.hint, param="prompt")
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.limits.vocab_size:
            self._check_ids("prompt", [lowest, highest])

    def _check_beams(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        answer = self.limits.prompts.judge(num_prompt_tokens, params.beam_width)
        if answer.verdict is Verdict.NEVER:
            raise InvalidRequest(answer.reason, hint=answer.hint, param="beam_width")

    # -- sampling params ---------------------------------------------------------------------------

    def _resolve_params(self, params: SamplingParams) -> SamplingParams:
        """Checked against the model; a copy where something had to be filled in."""
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        if params.stop_strings:
            self._need_tokenizer(
                "stop: stop texts need a tokenizer, and this engine has none", "stop"
            )
        if params.bad_words:
            return msgspec.structs.replace(
                params, bad_words_token_ids=self._encode_bad_words(params.bad_words)
            )
        return params

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidRequest(
                    f"{name}: got the token id {token}, allowed are 0 to"
                    f" {self.limits.vocab_size - 1}",
                    param=name,
                )

    def _check_logprobs(self, name: str, value: int | None) -> None:
        if value is None:
            return
        wanted = self.limits.vocab_size if value == -1 else value
        if wanted > self.limits.max_logprobs:
            whole = f" (the whole vocabulary, {wanted})" if value == -1 else ""
            message = f"{name}: got {value}{whole}, allowed are at most {self.limits.max_logprobs}"
            raise InvalidRequest(
                message, hint="the engine's option max_logprobs sets this limit", param=name
            )

    def _encode_bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it is tokenized at the start of a text and after a space."""
        tokenizer = self._need_tokenizer(
            "bad_words: words need a tokenizer, and this engine has none", "bad_words"
        )
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        return [list(token_ids) for token_ids in found if token_ids]

    def _need_tokenizer(self, message: str, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                message,
                hint="pass prompts as token ids, or start without skip_tokenizer_init",
                param=param,
            )
        return self.tokenizer

    # -- who asks, and seeds -----------------------------------------------------------------------

    def _check_origin(self, origin: Origin) -> None:
        priority = origin.priority
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 1 << 31:
            raise InvalidRequest(
                f"priority: got {priority!r}, allowed is a whole number of 32 bits",
                param="priority",
            )
        if priority and self._scheduling_policy != "priority":
            got = (
                f"priority: got {priority}, allowed is 0 under the policy"
                f" {self._scheduling_policy!r}"
            )
            raise InvalidRequest(
                got, hint="start the engine with scheduling_policy priority", param="priority"
            )

    def _draw_seed(self) -> int:
        """The same for the same engine seed and the same number of requests before."""
        self._num_requests += 1
        digest = blake2b(f"{self._seed}/{self._num_requests}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, a dict, a list of ids) or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts: got {type(prompts).__name__}, allowed are a text, token ids, a dict of one,"
            " or a list of them"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _check_prompt_logprob_start(start: int | None, num_prompt_tokens: int) -> None:
    if start is not None and start >= num_prompt_tokens:
        message = (
            f"prompt_logprob_start: got {start}, the prompt has {num_prompt_tokens} tokens; allowed"
            f" are 0 to {num_prompt_tokens - 1}"
        )
        raise InvalidRequest(message, param="prompt_logprob_start")


def _samples(first: EngineRequest, params: SamplingParams) -> list[EngineRequest]:
    """The first computes the prompt (and its logprobs); the others wait to share it. The beams of a
    search are the core's business.
    """
    replace = msgspec.structs.replace
    if params.beam_width is not None:
        return [first]
    if params.is_ranked and params.logprobs is None:
        params = replace(params, logprobs=0)
        first = replace(first, params=params)
    if params.num_samples == 1:
        return [first]
    others = (
        params
        if params.prompt_logprobs is None
        else replace(params, prompt_logprobs=None, prompt_logprob_start=None)
    )
    return [first] + [
        replace(
            first,
            request_id=f"{first.request_id}#{index}",
            params=others,
            sample_index=index,
            fork_of=first.request_id,
        )
        for index in range(1, params.num_samples)
    ]


def default_sampling_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams as the model's generation_config has them, where it says anything."""
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
    given = {
        ours: generation_config[theirs]
        for theirs, ours in names.items()
        if generation_config.get(theirs) is not None
    }
    return SamplingParams(**given)
