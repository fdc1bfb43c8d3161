"""Hooks of extensions that add counters and gauges to /metrics.

Counters are read from `EngineStats`, gauges from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.stats import EngineStats
from octavo.utils.extensions import get_hooks

Series: TypeAlias = tuple[str, Callable[[EngineStats], float]]
"""Help text, and a function that reads the value."""


class OptionGauge(NamedTuple):
    """A gauge that depends on a model's options."""

    help: str
    label: str
    read: Callable[[EngineConfig], Mapping[str, float]]
    """Returns a value for each value of the label."""


class MetricHooks:
    """Metrics of one extension. The defaults add nothing."""

    counters: Mapping[str, Series] = {}
    gauges: Mapping[str, OptionGauge] = {}


def metric_hooks() -> tuple[MetricHooks, ...]:
    return get_hooks("metrics", MetricHooks)
