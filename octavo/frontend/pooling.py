"""Pooling requests: validates texts and converts them to EngineRequests, and builds jobs of several
prompts whose pooled rows are combined.

LLM, AsyncLLM and the server's routes run jobs in different ways. The input processor tokenizes
prompts and checks their length. Thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from octavo.api.errors import InvalidRequest, shown
from octavo.api.outputs import RequestOutput
from octavo.api.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    TokenSimilarity,
)
from octavo.api.pooling_params import (
    MODEL_LIMIT,
    MarkedText,
    PoolingActivation,
    PoolingParams,
    PoolingTask,
    TextPair,
)
from octavo.engine.protocol.requests import EngineRequest
from octavo.frontend.arguments import PoolingPrompt, Prompt, get_pooling_params, prompt_list
from octavo.frontend.input_processor import (
    DEFAULT_CONTEXT,
    InputProcessor,
    ParentRequest,
    RequestContext,
)
from octavo.frontend.params_resolver import need_tokenizer
from octavo.frontend.prompt_inputs import TEXT_KEYS


@dataclass(frozen=True, slots=True)
class Pools:
    """Properties of a model's pooled rows, and how its checkpoint derives outputs from them."""

    task: PoolingTask
    program: str
    """Name of the Program that pools."""
    width: int
    normalize: bool
    lower_case: bool
    """Whether texts are lowercased before they are tokenized."""
    prefix: str = ""
    """Prefix of texts to embed."""
    has_segments: bool = False
    """Whether the model reads segment ids, which distinguish the two texts of a pair."""
    activation: PoolingActivation = "none"
    """Activation of a classifier's scores, unless a request sets another one."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels."""
    pair_template: str | None = None
    """Jinja template for pairs of texts if the tokenizer's chat template accepts none; "" if only
    such a chat template works; None if special tokens separate the texts.
    """
    markers: tuple[str, ...] = ()
    """Tokens that a late-interaction model inserts after the first token of queries and of
    documents; () if there are none."""
    skiplist: tuple[str, ...] = ()
    """Tokens of documents that `compare` ignores."""
    compare: TokenSimilarity | None = None
    """Similarity of a query and a document; None if texts have one embedding each."""
    dimensions: Sequence[int] = ()
    """Widths to which an embedding may be truncated, according to the checkpoint."""


class TokenizedPrompt(NamedTuple):
    """A prompt as tokens."""

    token_ids: list[int]
    text: str | None = None
    """Text of the token ids; None for token ids or a pair."""
    second_start: int | None = None
    """Index of the first token of the second segment; None if there is only one segment."""


@dataclass(frozen=True, slots=True)
class PoolingInputs:
    """Turns texts and PoolingParams into ParentRequests."""

    pools: Pools
    inputs: InputProcessor

    def process(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: PoolingParams,
        origin: RequestContext = DEFAULT_CONTEXT,
    ) -> ParentRequest:
        """Checks a request and tokenizes its prompt."""
        origin = self.inputs.checked_origin(origin)
        params = self._resolve(params)
        if isinstance(prompt, TextPair):
            read = self._read_pair(prompt, self._limit(params))
        elif isinstance(prompt, MarkedText):
            read = self._read_marked(prompt, self._limit(params))
        else:
            read = self._read(prompt, self._limit(params))
        token_ids = read.token_ids
        self.inputs.check_prompt(token_ids, num_needed=params.num_needed_tokens)
        arrival_time = time.monotonic()
        request = EngineRequest(
            self.inputs.next_core_id(),
            token_ids,
            params,
            seed=0,
            priority=origin.priority,
            tenant=origin.tenant,
            arrival_time=arrival_time,
            program=self.pools.program,
            second_start=read.second_start,
        )
        self.inputs.set_priority(request)
        return ParentRequest(
            request_id=request_id,
            prompt=read.text,
            prompt_token_ids=token_ids,
            params=params,
            samples=[request],
            arrival_time=arrival_time,
            origin=replace(origin, priority=request.priority),
        )

    def _resolve(self, params: PoolingParams) -> PoolingParams:
        """Returns the params with the checkpoint's values for unset fields. The model-independent
        checks are repeated.
        """
        params = msgspec.structs.replace(params)
        pools = self.pools
        embeds = pools.task in ("embed", "token_embed")
        for name in ("activation",) if embeds else ("dimensions", "normalize"):
            if getattr(params, name) is not None:
                what = "embedding models" if embeds else "classifiers"
                raise InvalidRequest(
                    f"{name}: got {shown(getattr(params, name))}, which {what} do not support",
                    hint="remove it",
                    param=name,
                )
        if embeds:
            self._check_dimensions(params.dimensions)
        normalize = pools.normalize if params.normalize is None else params.normalize
        return msgspec.structs.replace(
            params,
            normalize=embeds and normalize,
            activation=params.activation or pools.activation,
        )

    def _check_dimensions(self, dimensions: int | None) -> None:
        """Raises InvalidRequest if the model's embeddings cannot be truncated to `dimensions`."""
        pools = self.pools
        if dimensions is None or dimensions == pools.width or dimensions in pools.dimensions:
            return
        if isinstance(pools.dimensions, range):
            allowed = f"1 to {pools.width}"
        else:
            allowed = ", ".join(map(str, sorted({*pools.dimensions, pools.width})))
        raise InvalidRequest(
            f"dimensions: got {dimensions}, expected {allowed}",
            hint="a model declares the supported dimensions as `matryoshka_dimensions`",
            param="dimensions",
        )

    def _limit(self, params: PoolingParams) -> int | None:
        """Returns the number of tokens to which a prompt is truncated. Returns None without
        truncation.
        """
        limit = params.truncate_prompt_tokens
        max_tokens = self.inputs.limits.prompts.most_tokens(params.num_needed_tokens)
        if limit == MODEL_LIMIT:
            return max_tokens
        if limit is not None and limit > max_tokens:
            raise InvalidRequest(
                f"truncate_prompt_tokens: got {limit}, expected 1 to {max_tokens}, or -1 for"
                f" {max_tokens}",
                param="truncate_prompt_tokens",
            )
        return limit

    def _read(self, prompt: Prompt, limit: int | None) -> TokenizedPrompt:
        """Returns a prompt's tokens and text, truncated to the limit."""
        if self.pools.task == "embed" and self.pools.prefix:
            prompt = _changed(prompt, lambda text: self.pools.prefix + text)
        if self.pools.lower_case:
            prompt = _changed(prompt, str.lower)
        text, token_ids, _ = self.inputs.prompts.read_prompt(
            prompt, may_be_long=limit is not None, keys=TEXT_KEYS
        )
        if limit is None or len(token_ids) <= limit:
            return TokenizedPrompt(token_ids, text)
        return TokenizedPrompt(self._cut(text, token_ids, limit), text)

    def _read_marked(self, marked: MarkedText, limit: int | None) -> TokenizedPrompt:
        """Returns the tokens of a query or a document, with its marker after the first token."""
        if not self.pools.markers:
            return self._read(marked.text, limit)
        marker = self._find_tokens(self.pools.markers[0 if marked.is_query else 1])
        limit = None if limit is None else limit - len(marker)
        first, *others = self._read(marked.text, limit).token_ids
        return TokenizedPrompt([first, *marker, *others], marked.text)

    def find_skipped_ids(self) -> frozenset[int]:
        """Returns the ids of the tokens of documents that scores ignore."""
        return frozenset(self._find_tokens(*self.pools.skiplist))

    def _find_tokens(self, *texts: str) -> list[int]:
        """Returns the ids of tokens by their spelling, without unknown ones."""
        tokenizer = need_tokenizer(self.inputs.tokenizer, "a text requires a tokenizer", "prompt")
        return [token for text in texts if (token := tokenizer.find_token(text)) is not None]

    def _read_pair(self, pair: TextPair, limit: int | None) -> TokenizedPrompt:
        """Returns the tokens of two texts, truncated to the limit. Tokens of the longer text are
        removed first.
        """
        if self.pools.task != "classify":
            raise InvalidRequest(
                "prompt: got a pair of texts, expected one text; the model embeds each text"
                " separately",
                param="prompt",
            )
        for text in (pair.first, pair.second):
            _check_half(text)
        if self.pools.lower_case:
            pair = replace(pair, first=pair.first.lower(), second=pair.second.lower())
        if limit is None and pair.max_second_tokens is None:
            self.inputs.prompts.check_length(pair.first, pair.second)
        tokenizer = need_tokenizer(
            self.inputs.tokenizer, "a pair of texts requires a tokenizer", "prompt"
        )
        encoded = tokenizer.encode_pair(pair, max_tokens=limit, template=self.pools.pair_template)
        if limit is not None and limit < encoded.num_fixed:
            raise _below_special(limit, encoded.num_fixed)
        segments = encoded.type_ids if self.pools.has_segments else []
        return TokenizedPrompt(encoded.token_ids, second_start=_second_start(segments))

    def _cut(self, text: str | None, token_ids: list[int], limit: int) -> list[int]:
        """Truncates to `limit` tokens, keeping the special tokens around a text. Token ids without
        a text are truncated at the end.
        """
        if text is None:
            return token_ids[:limit]
        own = self.inputs.prompts.encode_plain(text)
        num_special = len(token_ids) - len(own)
        first = next(at for at in range(num_special + 1) if token_ids[at : at + len(own)] == own)
        if limit < num_special:
            raise _below_special(limit, num_special)
        kept = own[: limit - num_special]
        return [*token_ids[:first], *kept, *token_ids[first + len(own) :]]


def _check_half(text: object) -> None:
    """Raises InvalidRequest if an element of a pair is not a text."""
    if not isinstance(text, str):
        raise InvalidRequest(
            f"prompt: got {shown(text)} in a pair, expected two texts", param="prompt"
        )


def _second_start(type_ids: list[int]) -> int | None:
    """Returns where the second segment starts. Returns None if there is none."""
    if 1 not in type_ids:
        return None
    start = type_ids.index(1)
    if type_ids[start:].count(1) != len(type_ids) - start:
        raise InvalidRequest(
            "prompt: the tokenizer interleaves the segments of a pair, which is not supported",
            param="prompt",
        )
    return start


def _below_special(limit: int, num_special: int) -> InvalidRequest:
    return InvalidRequest(
        f"truncate_prompt_tokens: got {limit}, expected at least {num_special}, the number of"
        f" special tokens around a text",
        param="truncate_prompt_tokens",
    )


def _changed(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """Returns a prompt with its text changed; token ids are unchanged."""
    if isinstance(prompt, str):
        return change(prompt)
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": change(prompt["prompt"])}
    return prompt


OutputT = TypeVar("OutputT")

Texts: TypeAlias = Prompt | Iterable[Prompt]
"""One or several texts, or token ids of a text to embed."""

PoolingPrompts: TypeAlias = PoolingPrompt | Iterable[PoolingPrompt]
"""One or several prompts, which may be pairs of texts."""


@dataclass(frozen=True, slots=True)
class PoolingJob(Generic[OutputT]):
    """The prompts of one call, and how their outputs are combined."""

    prompts: Sequence[PoolingPrompt]
    params: PoolingParams
    read: Callable[[Sequence[RequestOutput]], list[OutputT]]
    """Computes the call's outputs from the outputs of the prompts, in the order of the prompts."""


@dataclass(frozen=True, slots=True)
class PoolingJobs:
    """Builds jobs from users' arguments; raises InvalidRequest if the model does not have the
    task.
    """

    pools: Callable[..., PoolingInputs]
    """Returns the validation of a model that has one of the named tasks; raises InvalidRequest
    otherwise.
    """

    def embedding(
        self, prompts: Texts, params: PoolingParams | None = None
    ) -> PoolingJob[EmbeddingRequestOutput]:
        """Returns the job that computes an embedding of each prompt."""
        self.pools("embed")
        return PoolingJob(
            prompt_list(prompts),
            get_pooling_params(params),
            lambda outputs: [EmbeddingRequestOutput.of(output) for output in outputs],
        )

    def pooling(
        self, prompts: Texts, params: PoolingParams | None = None
    ) -> PoolingJob[PoolingRequestOutput]:
        """Returns the job that pools each prompt as the model does: an embedding or
        probabilities, of the text or of each token.
        """
        task = self.pools(*get_args(PoolingTask)).pools.task
        keeps_tokens = task in ("token_embed", "token_classify")
        return PoolingJob(
            prompt_list(prompts),
            get_pooling_params(params),
            lambda outputs: [
                PoolingRequestOutput.of(output, keeps_tokens=keeps_tokens) for output in outputs
            ],
        )

    def classification(
        self, prompts: PoolingPrompts, params: PoolingParams | None = None
    ) -> PoolingJob[ClassificationRequestOutput]:
        """Returns the job that classifies each prompt."""
        labels = self.pools("classify").pools.labels
        return PoolingJob(
            [prompts] if isinstance(prompts, TextPair) else prompt_list(prompts),  # type: ignore[arg-type]
            get_pooling_params(params),
            lambda outputs: [ClassificationRequestOutput.of(output, labels) for output in outputs],
        )

    def scoring(
        self,
        data_1: Texts,
        data_2: Texts,
        params: PoolingParams | None = None,
        *,
        max_second_tokens: int | None = None,
    ) -> PoolingJob[ScoringRequestOutput]:
        """Returns the job that scores each text of `data_2` with the single text of `data_1`, or
        with the text at the same index. A classifier with one label reads the pair, with the second
        text truncated to `max_second_tokens`; embeddings are compared by cosine similarity, those
        of tokens by the model's own similarity.
        """
        inputs = self.pools("classify", "embed", "token_embed")
        pools = inputs.pools
        params = get_pooling_params(params)
        _check_scores(pools)
        first, second = prompt_list(data_1, "data_1"), prompt_list(data_2, "data_2")
        _check_counts(len(first), len(second))
        if pools.task != "classify":
            if max_second_tokens is not None:
                raise InvalidRequest(
                    f"max_second_tokens: got {max_second_tokens}, requires a cross-encoder; this"
                    f" model embeds each text separately",
                    param="max_second_tokens",
                )
            if pools.compare is None:
                return _cosines(first, second, params)
            return _similarities(first, second, params, inputs)
        firsts = [_text(prompt, "data_1") for prompt in first] * (len(second) // len(first))
        seconds = [_text(prompt, "data_2") for prompt in second]
        return PoolingJob(
            [TextPair(*pair, max_second_tokens) for pair in zip(firsts, seconds, strict=True)],
            params,
            lambda outputs: [ScoringRequestOutput.of(output) for output in outputs],
        )


def _check_scores(pools: Pools) -> None:
    """Raises InvalidRequest if the model computes several scores for a pair of texts."""
    if pools.task == "classify" and pools.width != 1:
        raise InvalidRequest(
            f"model: has {pools.width} labels; scoring requires a model with one label, or an"
            f" embedding model",
            hint="use classify, which accepts pairs of texts as TextPair",
            param="model",
        )


def _cosines(
    first: list[Prompt], second: list[Prompt], params: PoolingParams
) -> PoolingJob[ScoringRequestOutput]:
    """Returns the job that embeds each text once and compares the embeddings."""

    def read(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        firsts = list(outputs[: len(first)]) * (len(second) // len(first))
        return list(map(ScoringRequestOutput.of_units, firsts, outputs[len(first) :]))

    units = msgspec.structs.replace(params, normalize=True)
    return PoolingJob([*first, *second], units, read)


def _similarities(
    first: list[Prompt], second: list[Prompt], params: PoolingParams, inputs: PoolingInputs
) -> PoolingJob[ScoringRequestOutput]:
    """Returns the job that embeds each text's tokens once and compares the embeddings."""
    compare, skipped = inputs.pools.compare, inputs.find_skipped_ids()
    assert compare is not None, "the model has token embeddings"

    def read(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        firsts = list(outputs[: len(first)]) * (len(second) // len(first))
        pairs = zip(firsts, outputs[len(first) :], strict=True)
        return [ScoringRequestOutput.of_tokens(*pair, compare, skipped) for pair in pairs]

    queries: list[PoolingPrompt] = [
        MarkedText(_text(prompt, "data_1"), is_query=True) for prompt in first
    ]
    documents = [MarkedText(_text(prompt, "data_2"), is_query=False) for prompt in second]
    return PoolingJob([*queries, *documents], params, read)


def _check_counts(num_first: int, num_second: int) -> None:
    if not num_second:
        raise InvalidRequest("data_2: got no text, expected at least one", param="data_2")
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"data_1: got {num_first} texts, expected one, or {num_second}, one for each text in"
            f" data_2",
            param="data_1",
        )


def _text(prompt: Prompt, name: str) -> str:
    """Returns a prompt's text; raises InvalidRequest if it has token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and len(prompt) == 1 else prompt
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{name}: got {shown(prompt)}, expected texts; the model reads queries and"
            " documents as texts",
            param=name,
        )
    return text
