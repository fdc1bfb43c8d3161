"""Hooks by which extensions add counters and gauges to /metrics.

Owns no value: counters are read from `EngineStats`, gauges from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.stats import EngineStats
from octavo.utils.extensions import get_hooks

Series: TypeAlias = tuple[str, Callable[[EngineStats], float]]
"""Help text of a series, and what reads its value."""


class OptionGauge(NamedTuple):
    """A gauge of a model's options."""

    help: str
    label: str
    read: Callable[[EngineConfig], Mapping[str, float]]
    """Returns a value for each value of the label."""


class MetricHooks:
    """What one extension adds to /metrics. The defaults add nothing."""

    counters: Mapping[str, Series] = {}
    gauges: Mapping[str, OptionGauge] = {}


def metric_hooks() -> tuple[MetricHooks, ...]:
    """Returns the hooks of the installed extensions."""
    return get_hooks("metrics", MetricHooks)
