"""Fields of a chat request that become variables of the model's chat template."""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.openai.bodies import ChatBody
from octavo.server.state.served_model import ServedModel

UNREAD_EFFORTS = ("none", "medium")
"""Efforts that a template without the variable satisfies: no thinking, and OpenAI's default."""


def template_variables(body: ChatBody, model: ServedModel) -> dict[str, Any]:
    """Returns the template's variables; InvalidRequest for a field that it does not read."""
    known = model.tokenizer.template_variables if model.tokenizer is not None else frozenset()
    known = known if body.chat_template is None else known | {"reasoning_effort", "documents"}
    variables = _effort(body.reasoning_effort, known)
    if body.documents:
        if "documents" not in known:
            raise InvalidRequest(
                "documents: the model's chat template reads no documents", param="documents"
            )
        variables["documents"] = body.documents
    return variables | (body.chat_template_kwargs or {})


def _effort(effort: str | None, known: frozenset[str]) -> dict[str, Any]:
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if effort not in UNREAD_EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort: got {effort!r}, but the model's chat template reads no such"
            " variable; allowed are 'none' and 'medium'",
            param="reasoning_effort",
        )
    return {"enable_thinking": False} if effort == "none" and "enable_thinking" in known else {}
