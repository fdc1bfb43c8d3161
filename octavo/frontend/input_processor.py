"""Validates requests once and converts them to EngineRequests; later stages need not check user
input.

Owns the model's limits (context, vocabulary, logprobs) and the seeds of unseeded requests;
`params_resolver.py` checks sampling params. Thread-safe.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest, shown
from octavo.api.lora_request import LoRARequest
from octavo.api.pooling_params import RequestParams
from octavo.api.sampling_options import MAX_BIAS, whole_number
from octavo.api.sampling_params import SamplingParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.prompt_limits import AllocStatus, PromptLimits
from octavo.engine.protocol.requests import BACKGROUND_PRIORITY, MAX_PRIORITY, EngineRequest
from octavo.engine.protocol.step import AdapterRef, EncoderInput
from octavo.frontend.arguments import Prompt, as_list
from octavo.frontend.encoder_inputs import EncoderInputs
from octavo.frontend.media import MediaInputs, PromptWithMedia
from octavo.frontend.params_resolver import ParamsResolver, need_tokenizer
from octavo.frontend.priority_function import PriorityFunction
from octavo.frontend.prompt_inputs import PromptInputs, check_can_start, to_int_ids
from octavo.text.grammar.lazy import LazyGrammars
from octavo.text.ports import EmbedsReader, MediaReader, Tokenizer
from octavo.text.unicode import check_unicode

DECODER_KEYS = ("decoder_prompt", "decoder_prompt_token_ids")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of one engine, which every request is checked against."""

    vocab_size: int
    prompts: PromptLimits
    max_logprobs: int
    processors: tuple[str, ...] = ()
    """Names of the logits processors that requests may use."""
    searches_forms: bool = True
    """Whether a beam search may use structured output."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Tenant and priority of a request. Lower priority values start first; the fair policy divides
    the engine among tenants. Under every policy, requests with BACKGROUND_PRIORITY start last.
    """

    priority: int = 0
    tenant: str = ""
    owner: str = ""
    """Name of the API key that sent the request; only its owner can see the request. "" without API
    keys.
    """


DEFAULT_CONTEXT = RequestContext()


@dataclass(slots=True)
class ParentRequest:
    """A validated user request: prompt, params, and one EngineRequest for each sample."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: RequestParams
    samples: list[EngineRequest]
    arrival_time: float
    origin: RequestContext = DEFAULT_CONTEXT
    lora_request: LoRARequest | None = None
    """Adapter as given by the user, repeated in the output."""

    @property
    def sampling_params(self) -> SamplingParams:
        """Sampling params of a generation request; raises InvalidRequest for a pooling request."""
        if isinstance(self.params, SamplingParams):
            return self.params
        raise InvalidRequest(
            f"request {self.request_id!r} is a pooling request, expected a generation request"
        )


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """A prompt as tokens."""

    text: str | None
    token_ids: list[int]
    """Tokens of the user's input, repeated in the output."""
    decoder_ids: list[int]
    """Tokens that the decoder continues; same as `token_ids` without an encoder."""
    salt: str = ""
    encoder_input: EncoderInput | None = None
    media: PromptWithMedia | None = None


class InputProcessor:
    """Converts prompts and params to ParentRequests; raises InvalidRequest or ContextTooLong."""

    def __init__(
        self,
        *,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int],
        seed: int,
        scheduling_policy: str = "fcfs",
        priority_function: PriorityFunction | None = None,
        grammars: LazyGrammars | None = None,
        images: MediaReader | None = None,
        embeds: EmbedsReader | None = None,
        encoder: EncoderInputs | None = None,
        banned_token_ids: Iterable[int] = (),
    ) -> None:
        """`encoder`: only for encoder-decoder models. `banned_token_ids`: tokens that the model's
        config excludes from sampling.
        """
        self.limits = limits
        self.prompts = PromptInputs(tokenizer, limits.prompts, MediaInputs(images, embeds), encoder)
        """Converts texts, ids and conversations to token ids."""
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.params = ParamsResolver(
            vocab_size=limits.vocab_size,
            max_logprobs=limits.max_logprobs,
            tokenizer=tokenizer,
            processors=limits.processors,
        )
        self._eos_token_ids = [
            token for token in dict.fromkeys(eos_token_ids) if token < limits.vocab_size
        ]
        banned = (token for token in banned_token_ids if 0 <= token < limits.vocab_size)
        self._banned = dict.fromkeys(banned, -MAX_BIAS)
        self._seed = seed
        self._scheduling_policy = scheduling_policy
        self._priority_function = priority_function
        self._grammars = grammars
        self._seed_numbers = itertools.count(1)
        self._core_ids = itertools.count()
        """Source of unique core request ids: a late output of an aborted request must not reach a
        new request with the same user-given id.
        """

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        origin: RequestContext = DEFAULT_CONTEXT,
        *,
        adapter: AdapterRef | None = None,
    ) -> ParentRequest:
        """Validates a request and tokenizes its prompt."""
        if self.encoder is None:
            read = self._read_text(prompt)
            if read.media is not None:
                _check_embeds(read.media, params)
        else:
            read = self._read_input(self.encoder, prompt)
        return self.process_inputs(request_id, read, params, origin, adapter=adapter)

    def process_inputs(
        self,
        request_id: str,
        tokenized: TokenizedInput,
        params: SamplingParams,
        origin: RequestContext = DEFAULT_CONTEXT,
        *,
        adapter: AdapterRef | None = None,
    ) -> ParentRequest:
        """Validates a request whose prompt is already tokenized."""
        origin = self.checked_origin(origin)
        token_ids = tokenized.decoder_ids
        self.check_prompt(token_ids)
        if params.beam_width is not None:
            self._check_beams(len(token_ids), params)
        params = self.params.resolve(params)
        if self.encoder is not None:
            _check_encoder_params(params)
        if self._banned:
            bias = {**(params.logit_bias or {}), **self._banned}
            params = msgspec.structs.replace(params, logit_bias=bias)
        if params.prompt_logprob_start is not None:
            _check_prompt_logprob_start(params.prompt_logprob_start, len(token_ids))
        own, grammar = params, None
        if params.structured_outputs is not None:
            grammar = self._grammar(params)
            own = msgspec.structs.replace(params, structured_outputs=None)
        arrival_time = time.monotonic()
        first = EngineRequest(
            self.next_core_id(),
            token_ids,
            own,
            seed=self._draw_seed() if params.seed is None else params.seed,
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
            cache_salt=tokenized.salt,
            priority=origin.priority,
            tenant=origin.tenant,
            arrival_time=arrival_time,
            grammar=grammar,
            adapter=adapter,
            media=[] if tokenized.media is None else tokenized.media.media,
            pixels=[] if tokenized.media is None else tokenized.media.pixels,
            encoder_input=tokenized.encoder_input,
        )
        self.set_priority(first)
        return ParentRequest(
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=tokenized.token_ids,
            params=params,
            samples=_samples(first),
            arrival_time=arrival_time,
            origin=replace(origin, priority=first.priority),
        )

    def _read_text(self, prompt: Prompt) -> TokenizedInput:
        """Tokenizes a prompt and its images for a decoder-only model."""
        text, token_ids, salt = self.prompts.read_prompt(prompt)
        placed = self.prompts.read_media(prompt, token_ids)
        if placed is not None:
            token_ids = placed.token_ids
        return TokenizedInput(text, token_ids, token_ids, salt, media=placed)

    def _read_input(self, encoder: EncoderInputs, prompt: Prompt) -> TokenizedInput:
        """Tokenizes a prompt for an encoder-decoder model."""
        named: Sequence[int] | None = None
        if isinstance(prompt, Mapping):
            decoder_fields = {
                key: prompt[key] for key in DECODER_KEYS if prompt.get(key) is not None
            }
            prompt = {key: prompt[key] for key in prompt if key not in DECODER_KEYS}
            if decoder_fields:
                named = self._decoder_prompt(decoder_fields)
        text, token_ids, salt = self.prompts.read_prompt(prompt)
        if not token_ids:
            raise InvalidRequest("prompt: got no token, expected at least one", param="prompt")
        self.params.check_ids("prompt", [min(token_ids), max(token_ids)])
        encoded = encoder.from_tokens(token_ids)
        return TokenizedInput(text, token_ids, encoder.prompt_of(named), salt, encoded)

    def _decoder_prompt(self, fields: Mapping[str, Any]) -> list[int]:
        """Returns the decoder prompt that the fields of a prompt's dict specify."""
        if len(fields) > 1:
            raise InvalidRequest(
                f"prompt: got {' and '.join(DECODER_KEYS)}, expected one of them", param="prompt"
            )
        ((key, value),) = fields.items()
        if isinstance(value, str) and key == "decoder_prompt":
            return self.prompts.encode_plain(value)
        token_ids = None if isinstance(value, str) else as_list(value)
        if token_ids is None or key == "decoder_prompt":
            allowed = "a string" if key == "decoder_prompt" else "token ids"
            raise InvalidRequest(f"{key}: got {shown(value)}, expected {allowed}", param="prompt")
        return to_int_ids(token_ids)

    def next_core_id(self) -> str:
        """Returns a new, unique request id for the core."""
        return str(next(self._core_ids))

    def check_prompt(self, token_ids: list[int], *, num_needed: int = 1) -> None:
        """Raises an error for a prompt that is empty, has unknown ids, or leaves no room for
        `num_needed` more tokens.
        """
        if not token_ids:
            raise InvalidRequest("prompt: got no token, expected at least one", param="prompt")
        check_can_start(self.limits.prompts.judge(len(token_ids), num_needed=num_needed))
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.limits.vocab_size:
            self.params.check_ids("prompt", [lowest, highest])

    def _check_beams(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        answer = self.limits.prompts.judge(num_prompt_tokens, params.beam_width)
        if answer.status is AllocStatus.NEVER:
            raise InvalidRequest(answer.reason, hint=answer.hint, param="beam_width")

    # -- structured output -------------------------------------------------------------------------

    def check_grammar(self, params: SamplingParams) -> None:
        """Compiles a request's grammar in advance for `process`; raises InvalidRequest if it is not
        supported. Thread-safe.
        """
        self._grammar(params)

    def has_grammar(self, params: SamplingParams) -> bool:
        """Returns whether a request's grammar has already been checked; True without one."""
        form = params.structured_outputs
        return form is None or self._grammars is None or self._grammars.knows(form)

    def _grammar(self, params: SamplingParams) -> GrammarSpec | None:
        """Returns the grammar of a request's structured output. Returns None without structured
        output.
        """
        form = params.structured_outputs
        if form is None:
            return None
        if params.beam_width is not None and not self.limits.searches_forms:
            raise InvalidRequest(
                f"{form.given_as}: structured output with beam search is not supported by the"
                f" torch backend",
                param=form.given_as,
                hint="use the native backend, or remove beam_width",
            )
        need_tokenizer(
            self.tokenizer,
            f"{form.given_as}: structured output requires a tokenizer, and this engine has none",
            form.given_as,
        )
        if self._grammars is None or not self._eos_token_ids:
            raise InvalidRequest(
                f"{form.given_as}: structured output requires an end token, and the model has none",
                param=form.given_as,
            )
        return self._grammars.admit(form)

    def continues(self, spec: GrammarSpec, token_ids: Sequence[int]) -> bool:
        """Returns whether the grammar allows an output that begins with these tokens."""
        return self._grammars is not None and self._grammars.continues(spec, token_ids)

    # -- priorities and seeds ----------------------------------------------------------------------

    def checked_origin(self, origin: RequestContext) -> RequestContext:
        priority = whole_number(origin.priority)
        is_background = priority == BACKGROUND_PRIORITY
        if priority is None or (abs(priority) > MAX_PRIORITY and not is_background):
            raise InvalidRequest(
                f"priority: got {shown(origin.priority)}, expected a 32-bit integer",
                param="priority",
            )
        if priority and not is_background and self._scheduling_policy != "priority":
            got = (
                f"priority: got {priority}, expected 0 under the policy {self._scheduling_policy!r}"
            )
            raise InvalidRequest(
                got, hint="start the engine with scheduling_policy priority", param="priority"
            )
        if not isinstance(origin.tenant, str):
            raise InvalidRequest(
                f"tenant: got {shown(origin.tenant)}, expected a string", param="tenant"
            )
        if origin.tenant:
            check_unicode(origin.tenant, "tenant")
        return replace(origin, priority=priority)

    def set_priority(self, request: EngineRequest) -> None:
        """Sets the priority by `priority_function`, if configured and the request is not a
        background request.
        """
        if self._priority_function is not None and request.priority != BACKGROUND_PRIORITY:
            request.priority = self._priority_function(request)

    def _draw_seed(self) -> int:
        """Returns a seed derived from the engine's seed and the number of seeds derived before."""
        number = next(self._seed_numbers)
        digest = blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _check_embeds(prompt: PromptWithMedia, params: SamplingParams) -> None:
    """Raises InvalidRequest for logprobs of a prompt of embeddings, which has no tokens."""
    has_embeds = any(each.kind == "embeds" for each in prompt.pixels)
    if has_embeds and params.prompt_logprobs is not None:
        raise InvalidRequest(
            f"prompt_logprobs: got {params.prompt_logprobs} with prompt_embeds, which have"
            " no token ids",
            hint="remove prompt_logprobs",
            param="prompt_logprobs",
        )


def _check_encoder_params(params: SamplingParams) -> None:
    """Raises InvalidRequest if the params of an encoder-decoder request are not supported."""
    if params.prompt_logprobs is not None:
        raise InvalidRequest(
            f"prompt_logprobs: got {params.prompt_logprobs}, which an encoder-decoder does not"
            f" support",
            hint="remove prompt_logprobs (and echo with logprobs)",
            param="prompt_logprobs",
        )


def _check_prompt_logprob_start(start: int, num_prompt_tokens: int) -> None:
    if start >= num_prompt_tokens:
        message = (
            f"prompt_logprob_start: got {start}, expected 0 to {num_prompt_tokens - 1} for a prompt"
            f" of {num_prompt_tokens} tokens"
        )
        raise InvalidRequest(message, param="prompt_logprob_start")


def _samples(first: EngineRequest) -> list[EngineRequest]:
    """Creates an EngineRequest for each sample: the first one computes the prompt (and its
    logprobs), the others wait to share its blocks. A beam search is a single EngineRequest, since
    the core manages its beams.
    """
    copy, params = msgspec.structs.replace, first.params
    if params.beam_width is not None:
        return [first]
    if params.is_ranked and params.logprobs is None:
        params = copy(params, logprobs=0)
        first = copy(first, params=params)
    if params.num_samples == 1:
        return [first]
    others = (
        params
        if params.prompt_logprobs is None
        else copy(params, prompt_logprobs=None, prompt_logprob_start=None)
    )
    return [first] + [
        copy(
            first,
            request_id=f"{first.request_id}#{index}",
            params=others,
            sample_index=index,
            fork_of=first.request_id,
        )
        for index in range(1, params.num_samples)
    ]
