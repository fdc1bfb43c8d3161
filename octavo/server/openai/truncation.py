from __future__ import annotations

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import InvalidRequest
from octavo.frontend.prompt_inputs import Truncation
from octavo.server.openai.bodies import PromptBody


def parse_truncation(body: PromptBody, llm: AsyncLLM, max_tokens: int | None) -> Truncation | None:
    """Returns the prompt truncation, checked against the context. -1 leaves room for `max_tokens`,
    or for one token if there is no limit. Returns None if the body requests no truncation.
    """
    asked, longest = body.truncate_prompt_tokens, llm.info.max_model_len - 1
    if asked is None:
        return None
    if asked != -1 and not 1 <= asked <= longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens: got {asked}, expected -1 or 1 to {longest}",
            param="truncate_prompt_tokens",
        )
    room = max(1, longest + 1 - max(max_tokens or 1, 1))
    return Truncation(room if asked == -1 else asked, body.truncation_side or "left")
