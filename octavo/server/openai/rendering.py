"""Chat template options of a request."""

from __future__ import annotations

from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.server.ignored import IgnoredFields
from octavo.server.openai.bodies import ConversationBody
from octavo.server.settings import ServerSettings
from octavo.server.state.served_model import ServedModel
from octavo.text.ports import Rendering

UNREAD_EFFORTS = ("none", "medium")
"""Efforts that need no support by the template: no thinking, and OpenAI's default."""


def make_rendering(
    body: ConversationBody,
    model: ServedModel,
    settings: ServerSettings,
    *,
    add_special_tokens: bool = False,
) -> Rendering:
    """Returns the rendering options; raises InvalidRequest for unsupported ones."""
    names = () if model.tokenizer is None else model.tokenizer.chat_template_names
    is_foreign = body.chat_template is not None and body.chat_template not in names
    if is_foreign and not settings.trust_request_chat_template:
        named = f"; it has {', '.join(map(repr, names))}" if names else ""
        raise InvalidRequest(
            f"chat_template: this server uses the model's own chat template{named}",
            hint="start the server with --trust-request-chat-template",
            param="chat_template",
        )
    add_prompt = body.add_generation_prompt
    return Rendering(
        not body.continue_final_message if add_prompt is None else add_prompt,
        body.continue_final_message,
        _variables(body, model),
        body.chat_template,
        is_foreign=is_foreign,
        add_special_tokens=add_special_tokens,
    )


def _variables(body: ConversationBody, model: ServedModel) -> dict[str, Any]:
    """Returns the template variables; raises InvalidRequest for fields that the template does not
    read.
    """
    known = model.tokenizer.template_variables if model.tokenizer is not None else frozenset()
    known = known if body.chat_template is None else known | {"reasoning_effort", "documents"}
    variables = effort_variables(body.reasoning_effort, known, "reasoning_effort", body.ignored)
    if body.documents:
        if "documents" not in known:
            raise InvalidRequest(
                "documents: the model's chat template does not support documents",
                param="documents",
                hint="put the documents into a message",
            )
        variables["documents"] = body.documents
    return variables | (body.chat_template_kwargs or {})


def effort_variables(
    effort: str | None, known: frozenset[str], name: str, ignored: IgnoredFields
) -> dict[str, Any]:
    """Returns the template variables for an effort; `name` is the field's."""
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if effort not in UNREAD_EFFORTS:
        ignored.add(
            name,
            f"got {effort!r}, but the model's chat template has no such variable; expected"
            " 'none' and 'medium'",
        )
    return {"enable_thinking": False} if effort == "none" and "enable_thinking" in known else {}
