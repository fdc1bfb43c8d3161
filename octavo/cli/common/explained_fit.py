"""`octavo serve --explain`: the options chosen for the free memory, and their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.api.errors import ConfigError
from octavo.cli.common.style import paint
from octavo.config.sizes import format_bytes
from octavo.wiring.fitting.fit import TYPICAL_CONTEXT, EngineFit, fit_to_memory
from octavo.wiring.fitting.machine_rates import get_ceilings
from octavo.worker.speed import Roofline


def explain_fit(options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines for a model with these options. Raises InsufficientMemory if no options make
    it fit, ConfigError if the backend knows its memory only after loading.
    """
    fit = fit_to_memory(options)
    if fit is None:
        raise ConfigError(
            "explain: requires the native or reference backend and a known memory size",
            hint="octavo plan MODEL --memory SIZE estimates the memory",
        )
    capacity = fit.plan.capacity
    yield paint(f"{options['model']}: {format_bytes(capacity.memory_bytes)} of memory", bold=True)
    choices = list(fit.choices())
    names = max(len(choice.option) for choice in choices)
    values = max(len(choice.value) for choice in choices)
    for choice in choices:
        mark = "*" if choice.option in fit.options else " "
        yield f"{mark} {choice.option:<{names}}  {choice.value:>{values}}  {choice.reason}"
    yield ""
    yield (
        f"predicted: {format_bytes(fit.predicted_bytes)} of memory"
        f"{_speed(fit)}; * changed from the default to fit"
    )


def _speed(fit: EngineFit) -> str:
    """Returns the predicted rate of decoding one request; "" for a model that does not generate or
    whose weights are streamed.
    """
    plan = fit.plan
    if not plan.generates or plan.footprint.streamed_bytes:
        return ""
    roofline = Roofline(plan.work, plan.footprint, plan.capacity, get_ceilings(plan))
    context = min(TYPICAL_CONTEXT, plan.capacity.demand.max_model_len - 1)
    return f", {roofline.decode_tokens_per_s(1, context):,.1f} tokens/s for one request"
