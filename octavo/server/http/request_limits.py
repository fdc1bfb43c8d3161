"""Limits on a single request in every API, from the server's settings."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import InvalidRequest
from octavo.api.pooling_params import RequestParams
from octavo.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits in addition to those of the model and the sampling params."""

    max_prompts: int
    max_n: int
    max_stop_strings: int
    max_stop_characters: int
    max_tools: int
    max_tool_bytes: int

    @staticmethod
    def of(settings: ServerSettings) -> RequestLimits:
        return RequestLimits(
            settings.max_prompts,
            settings.max_n,
            settings.max_stop_strings,
            settings.max_stop_characters,
            settings.max_tools,
            settings.max_tool_bytes,
        )

    def check(self, num_prompts: int, params: RequestParams) -> None:
        """Raises InvalidRequest for an exceeded limit, naming its flag."""
        stops, words = params.stop_strings, params.bad_words or []
        for param, what, value, allowed, flag in (
            ("prompt", "prompts", num_prompts, self.max_prompts, "max-prompts"),
            ("n", "samples", params.num_samples, self.max_n, "max-n"),
            ("stop", "texts", len(stops), self.max_stop_strings, "max-stop-strings"),
            (
                "stop",
                "characters",
                max(map(len, stops), default=0),
                self.max_stop_characters,
                "max-stop-characters",
            ),
            (
                "bad_words",
                "characters",
                max(map(len, words), default=0),
                self.max_stop_characters,
                "max-stop-characters",
            ),
        ):
            if value > allowed:
                raise InvalidRequest(
                    f"{param}: got {value} {what}, expected at most {allowed}",
                    hint=f"the server option --{flag} sets this limit",
                    param=param,
                )
