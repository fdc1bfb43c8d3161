"""A conversation in the terminal: its messages and slash commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.api.errors import (
    ConfigError,
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    OctavoError,
    did_you_mean,
)
from octavo.cli.common.answers import check_sampling, explain_end
from octavo.cli.conversation.chat_input import ChatInput, Entry
from octavo.cli.conversation.chat_models import ChatReply, LocalModel, RemoteModel
from octavo.config.data_file import read_data_file

DRAW_EVERY_S = 0.08
"""Minimum time between redraws, in seconds; each redraw parses the block's markdown."""
FENCES = ("```", "~~~")
MAX_BYTES = 64 << 20
"""Maximum size of a file in bytes."""
SETTABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Sampling parameters that /set accepts."""
ENDS = ("/bye", "/exit")
HELP = """\
/help                 show this help
/clear, /reset        start a new conversation
/show                 show the model and its default sampling params
/retry                regenerate the last response
/undo                 remove the last question and response
/system [TEXT]        show or set the system message (-: remove it)
/set [NAME [VALUE]]   show or set a sampling param; without VALUE, reset it
/save FILE            save the conversation
/load FILE            load a conversation
/bye, /exit           quit (or Ctrl-D)
Ctrl-C stops a response. Write a message of several lines in triple quotes (\"\"\"), or with a
backslash at the end of each line but the last."""


class ChatSession:
    """The messages and the input loop."""

    def __init__(
        self,
        model: LocalModel | RemoteModel,
        chat_input: ChatInput,
        sampling: dict[str, Any],
        system: str | None,
    ) -> None:
        self._model = model
        self._input = chat_input
        params = {name: value for name, value in sampling.items() if value is not None}
        self._sampling = {name: value for name, value in params.items() if name in SETTABLE}
        self._unsettable = {name: value for name, value in params.items() if name not in SETTABLE}
        self._system = system
        self._messages: list[SavedMessage] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _say(HELP),
            "/reset": lambda _: self._messages.clear(),
            "/clear": lambda _: self._messages.clear(),
            "/show": lambda _: _say(self._model.describe()),
            "/retry": self._retry,
            "/undo": self._undo,
            "/system": self._set_system,
            "/set": self._set,
            "/save": self._save,
            "/load": self._load,
        }

    def talk(self) -> None:
        """Reads and answers messages until the user ends the conversation."""
        while True:
            try:
                entry = self._input.read()
            except EOFError:
                return _say("")
            except KeyboardInterrupt:
                if not self._input.is_terminal:
                    return _say("")
                _say("\n(Ctrl-D or /bye quits)")
                continue
            if entry.is_command and entry.text in ENDS:
                return None
            self._handle(entry)

    def restore(self, name: str) -> None:
        """Continues a named session, whose KV blocks are read instead of computed. Without such a
        session, a new one begins. A system message given earlier replaces the session's.
        """
        messages = self._model.restore(name)
        if messages is None:
            _say(f"new session {name}")
            return
        if messages[:1] and messages[0]["role"] == "system":
            system = messages.pop(0)["content"]
            self._system = system if self._system is None else self._system
        self._messages = [msgspec.convert(message, SavedMessage) for message in messages]
        _say(f"session {name}: {len(messages)} messages")

    def store(self, name: str) -> None:
        """Saves the conversation and its KV blocks as a named session, unless it is empty."""
        if self._messages:
            self._model.save(name, self._spoken(self._messages))
            _say(f"saved session {name}")

    def _handle(self, entry: Entry) -> None:
        """Handles an entry. An error is printed and leaves the conversation unchanged."""
        try:
            if entry.is_command:
                self._run_command(entry.text)
            elif entry.text:
                self._answer(entry.text)
        except EngineDead:
            raise
        except OctavoError as error:
            hint = "/reset starts over" if isinstance(error, ContextTooLong) else error.hint
            _say(error.message + (f"\nhint: {hint}" if hint else ""))

    def _run_command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            known = [*self._commands, *ENDS]
            raise InvalidRequest(f"no such command: {name}", hint=did_you_mean(name, known))
        command(argument.strip())

    # -- answers -----------------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        """Answers a question and stores both; a stopped response is stored up to that point; a
        question without any response is discarded.
        """
        from octavo.text.unicode import check_unicode

        check_unicode(question)
        asked = SavedMessage(role="user", content=question)
        reply = self._reply([*self._messages, asked])
        if reply.text:
            self._messages += [asked, SavedMessage(role="assistant", content=reply.text)]

    def _reply(self, messages: list[SavedMessage]) -> ChatReply:
        screen = answer_screen()
        try:
            sampling = {**self._unsettable, **self._sampling}
            reply = self._model.reply(self._spoken(messages), sampling, screen.add)
        finally:
            screen.close()
        self._describe(reply)
        return reply

    def _spoken(self, messages: list[SavedMessage]) -> list[dict[str, str]]:
        """Returns the messages that the model receives."""
        spoken = [{"role": one.role, "content": one.content} for one in messages]
        if self._system is not None:
            spoken.insert(0, {"role": "system", "content": self._system})
        return spoken

    def _describe(self, reply: ChatReply) -> None:
        if reply.error is not None:
            _say(f"the request failed: {reply.error}")
        if reply.statistics is None:
            return
        _say(reply.statistics.describe())
        change = "max_tokens; use /set max_tokens N for more"
        note = explain_end(reply.statistics, reply.default_limit, change)
        if note is not None:
            _say(note)

    # -- commands ----------------------------------------------------------------------------------

    def _last_question(self) -> str:
        if not self._messages:
            raise InvalidRequest("no question has been asked yet")
        return self._messages[-2].content

    def _retry(self, _: str) -> None:
        question, before = self._last_question(), list(self._messages)
        del self._messages[-2:]
        try:
            self._answer(question)
        finally:
            self._messages = self._messages if len(self._messages) == len(before) else before

    def _undo(self, _: str) -> None:
        question = self._last_question()
        del self._messages[-2:]
        _say(f"removed: {question}")

    def _set_system(self, text: str) -> None:
        from octavo.text.unicode import check_unicode

        check_unicode(text)
        if text:
            self._system = None if text == "-" else text
        _say("no system message" if self._system is None else f"system message: {self._system}")

    def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if name:
            if name not in SETTABLE:
                raise InvalidRequest(
                    f"/set: unknown parameter {name!r}", hint=did_you_mean(name, SETTABLE)
                )
            changed = {key: kept for key, kept in self._sampling.items() if key != name}
            if value.strip():
                changed[name] = _value(name, value.strip())
            check_sampling(changed)
            self._sampling = changed
        shown = [f"{key} {self._sampling[key]}" for key in SETTABLE if key in self._sampling]
        _say(", ".join(shown) or "the default sampling params, see /show")

    def _save(self, path: str) -> None:
        write_chat(_path(path, "/save"), SavedChat(self._messages, self._system, self._sampling))
        _say(f"saved in {path}")

    def _load(self, path: str) -> None:
        chat = read_chat(_path(path, "/load"))
        unknown = [name for name in chat.sampling if name not in SETTABLE]
        if unknown:
            raise ConfigError(
                f"{path}: {unknown[0]} is not a sampling parameter that /set supports"
            )
        check_sampling(chat.sampling)
        self._messages, self._system = list(chat.messages), chat.system
        self._sampling = chat.sampling
        _say(f"{len(self._messages)} messages loaded")


def _path(text: str, command: str) -> Path:
    if not text:
        raise InvalidRequest(f"{command}: a file name is required", hint=f"{command} chat.json")
    return Path(text).expanduser()


def _value(name: str, text: str) -> Any:
    """Parses the value of a sampling parameter; an invalid text is returned unchanged and rejected
    by the parameter's check.
    """
    if name == "stop":
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _say(text: str) -> None:
    print(text, file=sys.stderr)


class SavedMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str


class SavedChat(msgspec.Struct, forbid_unknown_fields=True):
    """A saved conversation: messages, system message and sampling parameters."""

    messages: list[SavedMessage]
    system: str | None = None
    sampling: dict[str, Any] = {}


def read_chat(path: Path) -> SavedChat:
    """Reads a conversation; raises ConfigError if the file is not one."""
    file = read_data_file(path, name="chat", max_bytes=MAX_BYTES, kind="JSON")
    chat = file.convert(SavedChat, hint="use a file written by /save")
    if [one.role for one in chat.messages] != ["user", "assistant"] * (len(chat.messages) // 2):
        raise ConfigError(
            f"{path}: not a conversation: user and assistant messages must alternate",
            hint="use a file written by /save",
        )
    return chat


def write_chat(path: Path, chat: SavedChat) -> None:
    """Writes a conversation, readable only by its owner; overwrites only another conversation."""
    if path.exists():
        read_chat(path)
    text = msgspec.json.format(msgspec.json.encode(chat), indent=2)
    new = path.with_name(f".{path.name}.new")
    try:
        with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(text + b"\n")
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


class PlainScreen:
    """Prints a response as it is generated: markdown on a terminal, plain text otherwise.

    Complete blocks (up to a blank line outside code) are printed once; only the growing block
    is redrawn, so that long responses scroll normally.
    """

    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self) -> None:
        print(flush=True)


class MarkdownScreen:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._block = ""
        self._draw_at = 0.0

    def add(self, text: str) -> None:
        done, self._block = split_blocks(self._block + text)
        if done.strip():
            self._finish(done)
        if self._block.strip() and time.monotonic() >= self._draw_at:
            self._draw(self._block)

    def close(self) -> None:
        if self._block.strip():
            self._finish(self._block)
        self._block = ""

    def _finish(self, text: str) -> None:
        """Draws a completed block for the last time; from then on it scrolls with the terminal."""
        from rich.live import Live

        self._draw(text)
        self._live.stop()
        self._live = Live(console=self._console, auto_refresh=False)

    def _draw(self, text: str) -> None:
        from rich.markdown import Markdown

        if not self._live.is_started:
            self._console.print()
            self._live.start()
        self._live.update(Markdown(text), refresh=True)
        self._draw_at = time.monotonic() + DRAW_EVERY_S


def split_blocks(text: str) -> tuple[str, str]:
    """Splits markdown after its last blank line outside fenced code."""
    position = end = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = line.strip()[:3]
        if fence:
            fence = "" if mark == fence else fence
        elif mark in FENCES:
            fence = mark
        elif not mark and line.endswith("\n"):
            end = position
    return text[:end], text[end:]


def answer_screen() -> MarkdownScreen | PlainScreen:
    return MarkdownScreen() if sys.stdout.isatty() else PlainScreen()
