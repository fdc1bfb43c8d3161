"""Normalizes the arguments of LLM and AsyncLLM: prompts, conversations, and one value or several
for each of them, as lists, arrays or generators.

Checks types only; the input processor checks contents. Errors for ambiguous arguments suggest the
likely intention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from octavo.api.errors import InvalidRequest, shown
from octavo.api.lora_request import LoRARequest
from octavo.api.pooling_params import MarkedText, PoolingParams, TextPair
from octavo.api.sampling_options import whole_number
from octavo.api.sampling_params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text; token ids; {"prompt": text} or {"prompt_token_ids": ids}, optionally with a
"cache_salt".
"""

PoolingPrompt: TypeAlias = Prompt | TextPair | MarkedText
"""A prompt for pooling."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""One conversation: [{"role": "user", "content": "..."}, ...]"""

MESSAGE_KEYS = ("role", "content")


def get_text(prompt: PoolingPrompt) -> str:
    """Returns the text of a prompt that must be tokenized; "" if it has token ids."""
    if isinstance(prompt, TextPair):
        return prompt.first + prompt.second
    if isinstance(prompt, Mapping):
        prompt = "" if prompt.get("prompt_token_ids") is not None else prompt.get("prompt", "")
    return prompt if isinstance(prompt, str) else ""


def prompt_list(prompts: Prompt | Iterable[Prompt], name: str = "prompts") -> list[Prompt]:
    """Returns one prompt (a text, a dict, token ids) or several as a list of prompts; `name` is
    used in error messages.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = as_list(prompts)
    if items is None:
        raise InvalidRequest(
            f"{name}: got {type(prompts).__name__}, expected a string, token ids, a dict with one"
            " of them, or a list"
        )
    return [items] if items and whole_number(items[0]) is not None else items


def conversation_list(messages: Messages | Iterable[Messages]) -> list[Messages]:
    """Returns one conversation or several as a list of conversations."""
    items = as_list(messages)
    if items is None:
        return [check_messages(messages)]  # raises the error
    if items and not isinstance(items[0], list | tuple):
        return [check_messages(items)]
    return [check_messages(item) for item in items]


def check_messages(messages: Any) -> Messages:
    """Returns the argument if it is a conversation; raises InvalidRequest otherwise."""
    if isinstance(messages, str):
        raise _not_messages(messages, [{"role": "user", "content": messages}])
    if isinstance(messages, Mapping):
        raise _not_messages(messages, [dict(messages)])
    items = as_list(messages)
    if items is None:
        raise _not_messages(messages, [{"role": "user", "content": "..."}])
    for index, message in enumerate(items):
        _check_message(message, f"messages[{index}]")
    return items


def _not_messages(got: object, meant: list[Any]) -> InvalidRequest:
    return InvalidRequest(
        f"messages: got {shown(got)}, expected a list of messages, each a dict",
        hint=f"did you mean {shown(meant)}?",
        param="messages",
    )


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"{where}: got {shown(message)}, expected a dict with a role and a content",
            hint=f"did you mean {shown({'role': 'user', 'content': message})}?",
            param="messages",
        )
    # An assistant's message may have tool calls instead of text.
    needed = MESSAGE_KEYS[:1] if message.get("tool_calls") else MESSAGE_KEYS
    for key in needed:
        if key not in message:
            raise InvalidRequest(
                f"{where}: got {shown(dict(message))}, which has no {key!r}",
                hint="a message is a dict such as {'role': 'user', 'content': 'Hello'}",
                param="messages",
            )
    if not isinstance(message["role"], str):
        raise InvalidRequest(
            f"{where}.role: got {shown(message['role'])}, expected a string", param="messages"
        )


def params_for_each(
    params: SamplingParams | Iterable[SamplingParams], count: int
) -> list[SamplingParams]:
    """Returns params for each of `count` prompts; `params` is one value for all, or one for
    each.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Mapping):
        fields = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise InvalidRequest(
            f"sampling_params: got the dict {shown(params)}, expected SamplingParams",
            hint=f"did you mean SamplingParams({fields})?",
        )
    items = as_list(params)
    for item in [params] if items is None else items:
        if not isinstance(item, SamplingParams):
            raise InvalidRequest(
                f"sampling_params: got {shown(item)}, expected SamplingParams, or a list of"
                " them, one for each prompt"
            )
    assert items is not None, "what is no list was refused"
    return _for_each("sampling_params", items, count)


def get_pooling_params(
    params: PoolingParams | None, truncate_prompt_tokens: int | None = None
) -> PoolingParams:
    """Returns pooling params, with `truncate_prompt_tokens` set if it is given as a separate
    argument.
    """
    if params is None:
        params = PoolingParams()
    if not isinstance(params, PoolingParams):
        raise InvalidRequest(f"pooling_params: got {shown(params)}, expected PoolingParams")
    if truncate_prompt_tokens is None:
        return params
    return msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)


def priority_for_each(priority: int | Iterable[int], count: int) -> list[int]:
    """Returns a priority for each of `count` prompts; `priority` is one value for all, or one for
    each.
    """
    items = as_list(priority)
    return [priority] * count if items is None else _for_each("priority", items, count)  # type: ignore[list-item]


def adapter_for_each(
    adapter: LoRARequest | Iterable[LoRARequest | None] | None, count: int
) -> list[LoRARequest | None]:
    """Returns an adapter or None for each of `count` prompts; `adapter` is one value for all, or
    one for each.
    """
    items = as_list(adapter)
    adapters = [adapter] * count if items is None else _for_each("lora_request", items, count)
    for one in adapters:
        if one is not None and not isinstance(one, LoRARequest):
            raise InvalidRequest(
                f"lora_request: got {shown(one)}, expected a LoRARequest", param="lora_request"
            )
    return adapters  # type: ignore[return-value]  # the items have just been looked at


def _for_each(name: str, items: list[Any], count: int) -> list[Any]:
    if len(items) != count:
        raise InvalidRequest(
            f"{name}: got {len(items)}, expected one, or one for each of the {count} prompts"
        )
    return items


def as_list(value: object) -> list[Any] | None:
    """Returns the items of a list, an array or a generator. Returns None for a text, a single value
    or an unordered collection.
    """
    if isinstance(value, list):
        return value
    if hasattr(value, "tolist"):
        items = value.tolist()  # NumPy arrays and others
        return items if isinstance(items, list) else None
    if isinstance(value, str | bytes | Mapping | set | frozenset) or not isinstance(
        value, Iterable
    ):
        return None
    return list(value)
