"""Models of `octavo chat`: an engine in this process, or a server with an OpenAI-compatible API.

With both, Ctrl-C stops a response and returns the partial text.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.api.errors import ConfigError, SessionNotFound, WorkerFailed
from octavo.cli.common import answers
from octavo.cli.common.answers import Statistics, sampling_for
from octavo.utils.http_client import HttpClient, describe_error, parse_json

if TYPE_CHECKING:
    from httpx2 import Response

    from octavo.api.llm import LLM

Show = Callable[[str], None]
"""Receives each new piece of a response."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A response, possibly partial."""

    text: str
    statistics: Statistics | None = None
    error: str | None = None
    """Reason for an early end other than Ctrl-C."""
    default_limit: int | None = None
    """Token limit that applied because the user set none."""


class LocalModel:
    """An engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def reply(
        self, messages: Sequence[dict[str, str]], sampling: Mapping[str, Any], show: Show
    ) -> ChatReply:
        params = sampling_for(self._llm, dict(sampling))
        limit = params.max_tokens if sampling.get("max_tokens") is None else None
        outputs = self._llm.stream(self._llm.chat_prompt(list(messages)), params)
        text, output = "", None
        with _ctrl_c() as pressed, contextlib.closing(outputs):  # type: ignore[type-var]  # a generator
            for output in outputs:
                new, text = output.outputs[0].text[len(text) :], output.outputs[0].text
                show(new)
                if pressed:
                    break
        if output is None:
            return ChatReply(text)
        statistics = Statistics.of(output, "")
        return ChatReply(text, statistics, output.error, limit)

    def restore(self, name: str) -> list[dict[str, str]] | None:
        """Restores a session; returns its messages, None if there is no such session."""
        try:
            return self._llm.sessions.restore(name).session.messages or []
        except SessionNotFound:
            return None

    def save(self, name: str, messages: list[dict[str, str]]) -> None:
        prompt = self._llm.chat_prompt(messages, add_generation_prompt=False)
        self._llm.sessions.save(name, self._llm.compute_prefix(prompt), messages=messages)

    def describe(self) -> str:
        config, facts = self._llm.config, self._llm.info.model
        return "\n".join(
            [
                f"model       {config.model.served_model_name}, {facts.family},"
                f" {facts.num_parameters / 1e6:,.1f} M parameters, {facts.weight_format}",
                f"context     {self._llm.info.max_model_len:,} tokens",
                f"backend     {config.backend.backend}, {config.backend.threads} threads",
                self._llm.frontend.sampling.describe(),
            ]
        )


@contextlib.contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Records Ctrl-C instead of raising KeyboardInterrupt, since a response can be stopped only
    between steps.
    """
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class RemoteModel:
    def __init__(self, client: HttpClient, name: str | None = None) -> None:
        self._client = client
        self.name = name or self._first_name()
        self._is_octavo = client.get("/v1/capabilities").status_code == 200

    def _first_name(self) -> str:
        answer = self._client.get("/v1/models")
        if answer.status_code != 200:
            raise ConfigError(
                f"url: {self._client.url}/v1/models returned {describe_error(answer)}",
                hint="check --url, and --api-key if the server has keys",
            )
        try:
            return str(parse_json(answer.content)["data"][0]["id"])
        except (LookupError, TypeError, WorkerFailed) as error:
            raise ConfigError(
                f"url: {self._client.url}/v1/models did not return a list of models",
                hint="check that --url is an OpenAI-compatible server",
            ) from error

    def reply(
        self, messages: Sequence[dict[str, str]], sampling: Mapping[str, Any], show: Show
    ) -> ChatReply:
        params = {name: value for name, value in sampling.items() if value is not None}
        if not self._is_octavo:
            params.pop("repetition_detection", None)  # other servers may reject this field
        limit = None if "max_tokens" in params else answers.DEFAULT_MAX_TOKENS
        body = {
            **params,
            "max_tokens": params.get("max_tokens", limit),
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, error = _RemoteAnswer(self.name, show), None
        events = self._client.events("/v1/chat/completions", body)
        try:
            for event in events:
                answer.take(event)
        except KeyboardInterrupt:
            pass
        except WorkerFailed as failure:
            if not answer.text:
                raise
            error = failure.message
        finally:
            events.close()  # type: ignore[attr-defined]  # a generator
        return ChatReply(answer.text, answer.statistics(), error, limit)

    def restore(self, name: str) -> list[dict[str, str]] | None:
        """Restores a session; returns its messages, None if there is no such session."""
        body = {"action": "restore", "name": name, "model": self.name}
        answer = self._client.post("/v1/sessions", body)
        if answer.status_code == 404 and self._is_octavo:
            return None
        return self._read_session(answer)["messages"] or []

    def save(self, name: str, messages: list[dict[str, str]]) -> None:
        body = {"action": "save", "name": name, "model": self.name, "messages": messages}
        self._read_session(self._client.post("/v1/sessions", body))

    def _read_session(self, answer: Response) -> Any:
        if answer.status_code != 200:
            raise ConfigError(
                f"session: {self._client.url}/v1/sessions returned {describe_error(answer)}",
                hint="sessions require an Octavo server with --prefix-cache-dir, and its operator"
                " key if it has keys",
            )
        return parse_json(answer.content)

    def describe(self) -> str:
        return f"model       {self.name}\nserver      {self._client.url}"


class _RemoteAnswer:
    """A streamed response of a server and the times of its chunks."""

    def __init__(self, model: str, show: Show) -> None:
        self.text = ""
        self._model = model
        self._show = show
        self._sent = time.monotonic()
        self._times: list[float] = []
        self._usage: dict[str, int] = {}
        self._finish_reason: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Adds an event; raises WorkerFailed if it is an error."""
        if event.get("error"):
            raise WorkerFailed(str(event["error"].get("message", event["error"])))
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            new = choice.get("delta", {}).get("content") or ""
            if new:
                self._times.append(time.monotonic())
                self.text += new
                self._show(new)

    def statistics(self) -> Statistics:
        """Returns counts and times; without usage from the server, each chunk counts as a token."""
        num_tokens = self._usage.get("completion_tokens", len(self._times))
        spent_s = self._times[-1] - self._times[0] if self._times else 0.0
        return Statistics(
            model=self._model,
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            completion_tokens=num_tokens,
            time_to_first_token_s=self._times[0] - self._sent if self._times else None,
            tokens_per_second=(num_tokens - 1) / spent_s if spent_s > 0 else None,
            total_s=time.monotonic() - self._sent,
        )
