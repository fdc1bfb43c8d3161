"""Body fields and usage common to pooling requests."""

from __future__ import annotations

import msgspec

from octavo.server.fields import Whole, field, user_name
from octavo.server.http.body import Body


class PoolingBody(Body):
    """Base class of pooling bodies with OpenAI's and vLLM's names."""

    stream_type = None

    model: str | None = field("the name of a model", "model to use; null: the only model")
    truncate_prompt_tokens: Whole | None = field(
        "-1, or an integer from 1 to the model's maximum",
        "truncate the input to this many tokens; -1: to the model's maximum",
        rules={"minimum": -1},
    )
    user: str | None = user_name()
    priority: int | None = field(
        "a 32-bit integer",
        "scheduling priority, lower runs first; requires the priority policy",
        ge=-(2**31),
        lt=2**31,
    )


class PoolingUsage(msgspec.Struct):
    """Token counts of a pooling response."""

    prompt_tokens: int
    total_tokens: int

    @staticmethod
    def of(num_tokens: int) -> PoolingUsage:
        return PoolingUsage(num_tokens, num_tokens)
