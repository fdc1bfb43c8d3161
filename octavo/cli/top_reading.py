"""Reads a server's state for `octavo top`: /v1/models, /metrics and /v1/requests."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo.api.errors import ConfigError
from octavo.utils.http_client import HttpClient, describe_error, parse_json

PREFIX = "octavo:"
SHARES = {"kv_cache_usage_perc", "kv_cache_utilisation"}
"""Gauges that are ratios; over the engines of a model, they are averaged instead of added."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A server's state at one time."""

    time_s: float
    url: str
    series: dict[str, dict[str, float]] = field(default_factory=dict)
    """Values by model and by series name without prefix."""
    states: dict[str, str] = field(default_factory=dict)
    """State of each model, such as "ready"."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    note: str | None = None
    """Reason why no requests are listed."""


class ServerReader:
    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def read(self) -> Reading:
        """Reads everything; raises ConfigError if the server is not Octavo or rejects the key."""
        series = self._series()
        cards = self._client.get("/v1/models")
        states = {
            str(card["id"]): str(card.get("state", ""))
            for card in (parse_json(cards.content)["data"] if cards.status_code == 200 else ())
        }
        answer = self._client.get("/v1/requests")
        refused = answer.status_code != 200
        return Reading(
            time_s=time.monotonic(),
            url=self._client.url,
            series=series,
            states=states or dict.fromkeys(series, ""),
            requests=[] if refused else parse_json(answer.content)["data"],
            note=f"requests cannot be listed: {describe_error(answer)}" if refused else None,
        )

    def _series(self) -> dict[str, dict[str, float]]:
        answer = self._client.get("/metrics")
        if answer.status_code != 200:
            raise ConfigError(
                f"url: {self._client.url}/metrics returned {describe_error(answer)}",
                hint="set the server's key with --api-key"
                if answer.status_code in (401, 403)
                else None,
            )
        series = parse_metrics(answer.content.decode(errors="replace"))
        if not series:
            raise ConfigError(
                f"url: {self._client.url}/metrics has no Octavo metrics",
                hint="octavo top requires a server started by `octavo serve`",
            )
        return series


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Parses Octavo's gauges and counters by model and name, summed over engines (ratios are
    averaged).
    """
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[str, dict[str, float]] = {}
    num_engines: Counter[tuple[str, str]] = Counter()
    try:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PREFIX) and family.type in ("gauge", "counter"):
                for sample in family.samples:
                    if model := sample.labels.get("model_name"):
                        values = series.setdefault(model, {})
                        name = sample.name.removeprefix(PREFIX)
                        values[name] = values.get(name, 0.0) + sample.value
                        num_engines[model, name] += 1
    except ValueError as error:
        raise ConfigError(
            f"url: /metrics is not in the Prometheus text format: {error}",
            hint="check that --url is an Octavo server",
        ) from error
    for model, values in series.items():
        for share in SHARES & values.keys():
            values[share] /= num_engines[model, share]
    return series
