"""`octavo chat`: a conversation in the terminal.

Ctrl-C stops an answer, /reset starts over, /exit or Ctrl-D ends it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.flags import with_engine_flags
from octavo.cli.model import fetched
from octavo.cli.run import check_sampling, sampling_for

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams

HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@with_engine_flags(without=("seed",))
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default what the model recommends, else 0.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw among the likeliest tokens of this much probability together."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.")] = None,
    options: dict[str, Any],
) -> None:
    """Talk with a model."""
    from octavo.llm import LLM

    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    check_sampling(sampling)
    with LLM(**fetched(options)) as llm:
        print(HELP, file=sys.stderr)
        ChatSession(llm, sampling_for(llm, sampling), system).talk()


class ChatSession:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def talk(self) -> None:
        """Reads lines and answers them until the user ends the conversation."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() its history and editing
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt).strip()
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)
                return
            if line == "/exit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                print(f"no such command: {line} ({HELP})", file=sys.stderr)
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        """Answers a question and keeps both, an answer that was stopped as far as it came.

        A question that cannot be answered is taken back.
        """
        from octavo.errors import ClientError

        self._messages.append({"role": "user", "content": question})
        try:
            text = self._stream()
        except ClientError as error:
            self._messages.pop()
            print(f"{error}\nhint: /reset starts over", file=sys.stderr)
        else:
            self._messages.append({"role": "assistant", "content": text})

    def _stream(self) -> str:
        text = ""
        outputs = self._llm.stream(self._llm.chat_prompt(self._messages), self._params)
        with _ctrl_c() as pressed, contextlib.closing(outputs):  # type: ignore[type-var]  # a generator
            for output in outputs:
                if output.error is not None:
                    print(f"\nthe answer failed: {output.error}", file=sys.stderr)
                new, text = output.outputs[0].text[len(text) :], output.outputs[0].text
                sys.stdout.write(new)
                sys.stdout.flush()
                if pressed:
                    break
        print(flush=True)
        return text


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Collects Ctrl-C instead of raising, since an answer can only be stopped between two steps."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
