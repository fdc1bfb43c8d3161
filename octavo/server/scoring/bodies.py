"""Request bodies of classify, score and rerank: rows of the table in `server/fields.py`, with the
names of vLLM, Jina and Cohere.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from octavo.api.errors import InvalidRequest
from octavo.api.pooling_params import MODEL_LIMIT, PoolingParams
from octavo.server.fields import Whole, accepted, field, required
from octavo.server.http.body import Body
from octavo.server.http.body_part import BodyPart
from octavo.server.openai.bodies import TokenId
from octavo.server.pooling_body import PoolingBody

TEXTS = "a string, or a list of strings"
PAIR_FIELDS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
"""Names of the two sides of a score."""


class RerankDocument(BodyPart):
    text: str


Documents = Annotated[list[str | RerankDocument], Field(min_length=1)]


class ClassifierBody(PoolingBody):
    """Base class of bodies that use a classifier's scores."""

    use_activation: bool | None = field(
        "true or false",
        "apply the classifier's activation to the scores; null: the checkpoint's setting",
    )

    @property
    def params(self) -> PoolingParams:
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            activation="none" if self.use_activation is False else None,
        )


class ClassifyBody(ClassifierBody):
    input: str | list[str] | list[TokenId] | list[list[TokenId]] | list[tuple[str, str]] = required(
        "a string, token ids, or a list of either; or a list of pairs of texts", "input to classify"
    )


class ScoreBody(ClassifierBody):
    text_1: str | list[str] | None = field(TEXTS, "first text: one, or as many as in text_2")
    text_2: str | list[str] | None = field(TEXTS, "texts to score against text_1")
    data_1: str | list[str] | None = field(TEXTS, "alias of text_1")
    data_2: str | list[str] | None = field(TEXTS, "alias of text_2")
    queries: str | list[str] | None = field(TEXTS, "alias of text_1")
    documents: str | list[str] | None = field(TEXTS, "alias of text_2")
    items: str | list[str] | None = field(TEXTS, "alias of text_2")

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two given fields; raises InvalidRequest unless they form a pair."""
        given_fields = {
            name for pair in PAIR_FIELDS for name in pair if getattr(self, name) is not None
        }
        for pair in PAIR_FIELDS:
            if given_fields == set(pair):
                return pair
        allowed = ", or ".join(" and ".join(pair) for pair in PAIR_FIELDS)
        listed = ", ".join(sorted(given_fields)) or "none of them"
        raise InvalidRequest(f"text_1: got {listed}, expected {allowed}", param="text_1")


class RerankFields(Body):
    """Fields common to all rerank bodies."""

    query: str = required("a string", "query to compare the documents with")
    documents: Documents = required(
        "a list of one or more strings, or objects with a text", "documents to rank"
    )
    top_n: Whole | None = field(
        "an integer; 0 and null: all", "maximum number of results", ge=0, rules={"minimum": 0}
    )
    max_tokens_per_doc: Whole | None = field(
        "an integer of at least 1; cross-encoders only",
        "truncate each document to this many tokens",
        ge=1,
        rules={"minimum": 1},
    )

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RerankBody(ClassifierBody, RerankFields):
    """Body of POST /rerank and POST /v1/rerank."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"rank_fields"})

    return_documents: bool | None = field(
        "true or false; null: true", "return the document of each result"
    )
    max_chunks_per_doc: Whole | None = accepted("an integer; a document is one chunk")


class CohereRerankBody(RerankFields):
    stream_type = None

    model: str | None = field("the name of a model", "model to use; null: the only model")
    return_documents: bool | None = field(
        "true or false; null: false", "return the document of each result"
    )
    priority: int | None = field(
        "a 32-bit integer",
        "scheduling priority, lower runs first; requires the priority policy",
        ge=-(2**31),
        lt=2**31,
    )

    user: ClassVar[None] = None

    @property
    def params(self) -> PoolingParams:
        """Pooling params that truncate long texts, as Cohere does."""
        return PoolingParams(truncate_prompt_tokens=MODEL_LIMIT)
