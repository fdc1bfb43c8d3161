"""`octavo eval`: runs tasks of lm-eval (EleutherAI's harness) against a server.

The server is already running (--url) or started for the evaluation. lm-eval computes prompts and
scores; this module only passes the server's address to it.
"""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.api.errors import BackendUnavailable, ConfigError, WorkerFailed
from octavo.cli.bench_serve import KEY_VARIABLE, ApiKey
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model

MAX_LENGTH = 2048
"""Context length that lm-eval plans with, in tokens, if the server does not report one."""

Model = Annotated[
    str | None,
    typer.Argument(help="Short name, path or Hugging Face repository; with --url, a served name"),
]
Tasks = Annotated[
    list[str],
    typer.Option("--tasks", "-t", help="Run this task of lm-eval (repeatable)", metavar="TASK"),
]
Limit = Annotated[int | None, typer.Option(help="Use the first N examples of each task", min=1)]
NumFewshot = Annotated[
    int | None, typer.Option(help="Put N solved examples into each prompt", min=0)
]
IncludePath = Annotated[
    Path | None,
    typer.Option(help="Read task files (YAML) from this directory too", file_okay=False),
]
Concurrency = Annotated[int, typer.Option(help="Send N requests at once", min=1)]
Url = Annotated[
    str | None,
    typer.Option(help="Evaluate this server", show_default="a new one", metavar="URL"),
]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object")]


@with_engine_flags(without=("model", "served_model_name", "record"))
def eval(
    *,
    model: Model = None,
    tasks: Tasks,
    limit: Limit = None,
    num_fewshot: NumFewshot = None,
    include_path: IncludePath = None,
    concurrency: Concurrency = 8,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    options: dict[str, Any],
) -> None:
    """Evaluate a model with tasks of lm-eval, over the server's API. Requires octavo[eval]."""
    from octavo.tools.bench.started_server import started_server

    harness = _import_harness()
    if url is not None and options:
        raise ConfigError(
            f"{next(iter(options))}: got an engine option, but the server at --url already runs",
            hint="set the option on that server",
        )
    manager = harness.tasks.TaskManager(
        include_path=None if include_path is None else str(include_path)
    )
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(
            f"tasks: lm-eval has no task {unknown[0]!r}", hint="list them with: lm-eval ls tasks"
        )
    if model is not None and url is None:
        options["model"] = model
    server = started_server(with_local_model(options)) if url is None else nullcontext(url)
    key = None if url is None else api_key or os.environ.get(KEY_VARIABLE)
    with server as address, _openai_key(key):
        found = harness.simple_evaluate(
            _make_client(address, model if url is not None else None, key, concurrency),
            tasks=tasks,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            log_samples=False,
        )
    if json:
        print(json_format.dumps(found["results"], default=str))
    else:
        print(harness.utils.make_table(found))


def _import_harness() -> Any:
    """Imports lm-eval; raises BackendUnavailable if it is not installed."""
    try:
        import lm_eval
        import lm_eval.tasks
        import lm_eval.utils
    except ImportError:
        raise BackendUnavailable(
            "octavo eval requires lm-eval, which is not installed",
            hint="pip install 'octavo[eval]'",
        ) from None
    return lm_eval


@contextmanager
def _openai_key(key: str | None) -> Iterator[None]:
    """Sets the environment variable from which lm-eval's client reads its key."""
    name = "OPENAI_API_KEY"
    before = os.environ.get(name)
    os.environ[name] = key or "none"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _make_client(address: str, name: str | None, key: str | None, concurrency: int) -> Any:
    """Returns lm-eval's client of the server's completions, with the server's own tokenizer.

    `name` is a served model; None: the server's first one.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from octavo.utils.http_client import HttpClient, describe_error, parse_json

    client = HttpClient(address, key)
    answer = client.get("/v1/models")
    if answer.status_code != 200:
        raise WorkerFailed(
            f"url: {client.url}/v1/models returned {describe_error(answer)}",
            hint="check the address, and --api-key if the server needs one",
        )
    cards = {card["id"]: card for card in parse_json(answer.content)["data"]}
    card = cards.get(name) if name is not None else next(iter(cards.values()))
    if card is None:
        raise ConfigError(
            f"model: got {name!r}, the server has {', '.join(sorted(cards))}",
            hint="omit the model to evaluate the first one",
        )
    return LocalCompletionsAPI(
        base_url=f"{client.url}/v1/completions",
        model=card["id"],
        tokenizer_backend="remote",
        num_concurrent=concurrency,
        max_length=card.get("max_model_len") or MAX_LENGTH,
        batch_size=1,
    )
