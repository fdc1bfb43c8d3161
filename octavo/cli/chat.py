"""`octavo chat`: a conversation in the terminal, with a local model or a server."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from octavo.api.repetition_detection import LOOP
from octavo.cli.common.answers import (
    MaxTokensFlag,
    RepetitionFlag,
    SeedFlag,
    SystemFlag,
    TemperatureFlag,
    TopPFlag,
    check_answers,
    check_sampling,
    describe_sampling,
    new_seed,
    sampling_for,
)
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model
from octavo.config.paths import state_home

FLAGS = ("temperature", "top_p", "max_tokens", "seed")
"""Sampling parameters with a flag."""
GREETING = "/help lists the commands; Ctrl-C stops a response, /bye or Ctrl-D quits"
KEY_VARIABLE = "OCTAVO_API_KEY"


@with_engine_flags(without=("seed",))
def chat(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model, same as --model", show_default="smollm2"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Chat with a model of this server"),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Send this API key to --url", show_default=f"${KEY_VARIABLE}")
    ] = None,
    system: SystemFlag = None,
    temperature: TemperatureFlag = None,
    top_p: TopPFlag = None,
    max_tokens: MaxTokensFlag = None,
    seed: SeedFlag = None,
    session: Annotated[
        str | None,
        typer.Option(help="Continue this named session, and save it at the end", metavar="NAME"),
    ] = None,
    repetition_detection: RepetitionFlag = True,
    options: dict[str, Any],
) -> None:
    """Chat with a model. Type /help for the chat commands."""
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    check_sampling(sampling)
    sampling["repetition_detection"] = LOOP if repetition_detection else None
    options = options | _parse_name(name, options)
    if url is not None:
        key = api_key or os.environ.get(KEY_VARIABLE)
        _with_server(url, key, sampling, system, options, session=session)
    elif api_key is not None:
        from octavo.api.errors import ConfigError

        raise ConfigError("api_key: requires --url; a local model needs no key")
    else:
        chat_with_engine(sampling, system, options, session)


def _parse_name(name: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the model given as an argument as options; {} without one."""
    if name is None:
        return {}
    if "model" in options:
        from octavo.api.errors import ConfigError

        raise ConfigError(f"model: got {name!r} and --model {options['model']}, expected one")
    return {"model": name}


def chat_with_engine(
    sampling: dict[str, Any],
    system: str | None,
    options: dict[str, Any],
    session: str | None = None,
) -> None:
    """Loads a model and chats until the user ends the conversation."""
    from octavo.api.llm import LLM
    from octavo.cli.conversation.chat_models import LocalModel

    if session is not None:
        options = {"prefix_cache_dir": str(state_home() / "chats"), **options}
    with LLM(**with_local_model({"max_num_seqs": 1, "seed": new_seed(), **options})) as llm:
        check_answers(llm)
        if any(sampling.get(name) is not None for name in FLAGS):
            print(describe_sampling(sampling_for(llm, sampling)), file=sys.stderr)
        _run_session(LocalModel(llm), sampling, system, session)


def _with_server(
    url: str,
    key: str | None,
    sampling: dict[str, Any],
    system: str | None,
    options: dict[str, Any],
    *,
    session: str | None,
) -> None:
    from octavo.api.errors import ConfigError
    from octavo.cli.conversation.chat_models import RemoteModel
    from octavo.utils.http_client import HttpClient

    others = [name for name in options if name != "model"]
    if others:
        flag = "--" + others[0].replace("_", "-")
        raise ConfigError(
            f"{flag}: not supported with --url; the server has its own options", hint="remove it"
        )
    model = RemoteModel(HttpClient(url, key), options.get("model"))
    print(f"talking with {model.name}", file=sys.stderr)
    _run_session(model, sampling, system, session)


def _run_session(
    model: Any, sampling: dict[str, Any], system: str | None, session: str | None
) -> None:
    from octavo.cli.conversation.chat_input import ChatInput
    from octavo.cli.conversation.chat_session import ChatSession

    chat_input = ChatInput(state_home() / "chat_history")
    chat_session = ChatSession(model, chat_input, sampling, system)
    if session is not None:
        chat_session.restore(session)
    print(GREETING, file=sys.stderr)
    try:
        chat_session.talk()
    finally:
        if session is not None:
            chat_session.store(session)
