"""Conversion of messages to plain ones, common to several APIs.

Text parts are joined by newlines; other parts are rejected by path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from octavo.api.errors import InvalidRequest, shown
from octavo.api.sampling_params import SamplingParams
from octavo.frontend.sampling_defaults import params_over
from octavo.server.http.body import Body
from octavo.server.http.body_part import BodyPart
from octavo.server.http.errors import use_api_names
from octavo.server.state.served_model import ServedModel
from octavo.text.ports import Rendering

ASSISTANT = "assistant"


class TextBlock(BodyPart):
    """A block of a message's content."""

    type: str
    text: str | None = None


def join_text(content: str | Sequence[TextBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def block_text(block: TextBlock, where: str) -> str:
    """Returns the text of a block; raises InvalidRequest for other types."""
    if block.type != "text" or block.text is None:
        raise InvalidRequest(
            f"{where}: got a block of type {shown(block.type)}, expected blocks of type 'text'"
            " with a string",
            hint="this server's models accept text only",
            param=where,
        )
    return block.text


def refuse_values(body: Body, names: Iterable[str]) -> None:
    """Raises InvalidRequest if one of the fields is set and not empty."""
    for name in names:
        if getattr(body, name) not in (None, [], {}, "", False):
            raise InvalidRequest(f"{name}: not supported by this server", param=name)


def make_rendering(
    messages: Sequence[dict[str, Any]],
    model: ServedModel,
    *,
    continues: bool,
    enable_thinking: bool | None,
) -> Rendering:
    """Returns rendering options.

    With `continues` a final assistant message is continued. `enable_thinking` turns thinking on or
    off if the template supports that; None leaves it to the template.
    """
    goes_on = continues and messages[-1]["role"] == ASSISTANT
    sets = enable_thinking is not None and may_think(model)
    variables = {"enable_thinking": enable_thinking} if sets else {}
    return Rendering(not goes_on, goes_on, variables)


def may_think(model: ServedModel) -> bool:
    """Returns whether the template can turn thinking on and off."""
    tokenizer = model.tokenizer
    return tokenizer is not None and "enable_thinking" in tokenizer.template_variables


def make_params(
    asked: BaseModel, names: Mapping[str, str], defaults: SamplingParams, **others: Any
) -> SamplingParams:
    """Builds SamplingParams from a body over the model's recommended values.

    `names` maps the API's field names to SamplingParams'; `others` override them.
    """
    values = {
        ours: value
        for theirs, ours in names.items()
        if (value := getattr(asked, theirs)) is not None
    }
    with use_api_names(names):
        return params_over(defaults, {**values, **others})
