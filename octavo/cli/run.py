"""`octavo run [MODEL] PROMPT`: streams a response to stdout and prints statistics to stderr."""

from __future__ import annotations

import os
import select
import stat
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.api.repetition_detection import LOOP
from octavo.cli.common.answers import (
    MaxTokensFlag,
    RepetitionFlag,
    SeedFlag,
    Statistics,
    SystemFlag,
    TemperatureFlag,
    TopPFlag,
    check_answers,
    check_sampling,
    describe_sampling,
    explain_end,
    new_seed,
    sampling_for,
)
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import split_words, with_local_model

if TYPE_CHECKING:
    from octavo.api.llm import LLM
    from octavo.api.outputs import RequestOutput
    from octavo.api.sampling_params import SamplingParams


PATIENCE_S = 2.0
"""Seconds without input from a pipe before a message on stderr says that the command is waiting for
input.
"""


@with_engine_flags(without=("seed",))
def run(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="Model [default: smollm2] and prompt (-: read standard input; none: chat)",
            show_default=False,
        ),
    ] = None,
    system: SystemFlag = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt without the chat template"),
    ] = False,
    temperature: TemperatureFlag = None,
    top_p: TopPFlag = None,
    max_tokens: MaxTokensFlag = None,
    seed: SeedFlag = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop before this text (repeatable)", show_default=False),
    ] = None,
    repetition_detection: RepetitionFlag = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object instead of text")
    ] = False,
    options: dict[str, Any],
) -> None:
    """Generate a response to a prompt and stream it to the terminal."""
    from octavo.api.errors import InvalidRequest
    from octavo.api.llm import LLM
    from octavo.utils.progress import to_stderr

    model, prompt = split_words(words or [], options.get("model"))
    options = options | ({} if model is None else {"model": model})
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": stop or None,
    }
    check_sampling(sampling)
    names = [name for name, value in sampling.items() if value is not None]
    sampling["repetition_detection"] = LOOP if repetition_detection else None
    sampling["seed"] = new_seed() if seed is None else seed
    if raw and system is not None:
        raise InvalidRequest("--system: not supported with --raw", hint="remove --raw or --system")
    if prompt is None and sys.stdin.isatty() and not (raw or json):
        from octavo.cli.chat import chat_with_engine

        return chat_with_engine(sampling, system, options)
    text = _read_prompt("-" if prompt is None else prompt, raw=raw)
    with LLM(**with_local_model({"max_num_seqs": 1, **options})) as llm:
        check_answers(llm)
        params = sampling_for(llm, sampling)
        if names:
            to_stderr(describe_sampling(params))
        output = _stream(llm, _prompt(llm, text, system, raw=raw), params, quiet=json)
        statistics = Statistics.of(output, llm.config.model.served_model_name or "")
    _report(output, statistics, None if params.is_greedy else params.seed, json=json)
    limit = params.max_tokens if max_tokens is None else None
    note = explain_end(statistics, limit, "--max-tokens; use a larger value for longer output")
    if note is not None:
        print(note, file=sys.stderr)


def _read_prompt(argument: str, *, raw: bool) -> str:
    """Returns the prompt, read from standard input for "-". Text from a pipe or file is prepended
    to the prompt. Raises InvalidRequest if it is empty or not valid text.
    """
    from octavo.api.errors import InvalidRequest
    from octavo.text.unicode import check_unicode

    text = argument
    if argument == "-":
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    elif piped := _read_piped():
        text = piped + argument if raw else f"{piped.rstrip()}\n\n{argument}"
    if not (text if raw else text.strip()):
        raise InvalidRequest(
            "prompt: got an empty text", hint="for example: octavo run 'What is a prompt?'"
        )
    check_unicode(text)
    return text


def _read_piped() -> str:
    """Reads standard input if it is a pipe or a file; returns "" for a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # standard input is closed or not accessible
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    if not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
        note = "waiting for the end of standard input (a pipe); use < /dev/null for none"
        print(note, file=sys.stderr)
    return sys.stdin.read()


def _prompt(llm: LLM, text: str, system: str | None, *, raw: bool) -> Any:
    """Returns the prompt: the text itself, or rendered with the chat template. Without a template
    the text is completed, and a note is printed to stderr.
    """
    from octavo.api.errors import ConfigError

    if raw or not llm.get_tokenizer().has_chat_template:
        if system is not None:
            raise ConfigError("--system: the model has no chat template", hint="remove it")
        if not raw:
            name = llm.config.model.served_model_name
            print(f"{name} has no chat template; completing the text", file=sys.stderr)
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def _stream(llm: LLM, prompt: Any, params: SamplingParams, *, quiet: bool) -> RequestOutput:
    """Returns the final output; prints its text to stdout as it is generated, unless `quiet`."""
    num_shown, output = 0, None
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        if not quiet:
            sys.stdout.write(text[num_shown:])
            sys.stdout.flush()
        num_shown = len(text)
    assert output is not None, "every request ends in an output"
    return output


def _report(output: RequestOutput, statistics: Statistics, seed: int | None, *, json: bool) -> None:
    from octavo.api.errors import WorkerFailed

    if output.error is not None:
        raise WorkerFailed(output.error)
    if json:
        import json as json_format

        answer = {"text": output.outputs[0].text, **asdict(statistics), "seed": seed}
        print(json_format.dumps(answer, ensure_ascii=False))
    else:
        print(flush=True)
    print(statistics.describe(), file=sys.stderr)
