"""Hands on what each decode step of a plan yields as soon as it has, so that no token waits for the
plan's last one.

Stands between the steps of an executor (`ports.Between`), where it also sees that they do not last
too long, that they end with a request whose end the worker does not know, and that no promising
guess waits for the last one. What it has handed on is taken out of the scheduler's outputs of the
whole plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.engine.requests.request import EngineOutput
from octavo.engine.scheduling import multi_step
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.step import RowResult

Send = Callable[[list[EngineOutput]], bool]
"""Takes outputs; False leaves them untaken, and no further decode step is computed."""


class EarlyOutputs:
    """The early outputs of one plan, made just before its first step begins."""

    def __init__(self, scheduler: Scheduler, send: Send, *, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._clock = clock
        self._began = clock()
        self._num_sent = 0
        """Decode steps whose outputs were sent."""
        self._error: Exception | None = None

    def __call__(self, rows: Sequence[RowResult]) -> bool:
        """Sends what `rows` hold and returns True where another step follows; False ends the plan,
        and they come with its outputs.
        """
        num_steps, elapsed_s = self._num_sent + 1, self._clock() - self._began
        if elapsed_s * (num_steps + 1) > multi_step.MAX_CALL_S * num_steps:
            return False
        if self._scheduler.ends_any(rows) or self._scheduler.is_tempted(rows):
            return False
        try:
            goes_on = self._send(self._scheduler.preview(rows, elapsed_s))
        except Exception as error:  # to the executor this would be a fault of its own
            self._error = error
            return False
        self._num_sent += goes_on
        return goes_on

    def rest(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Returns the part of `outputs` that is still to be sent; raises what sending the others
        raised.
        """
        if self._error is not None:
            raise self._error
        if self._num_sent:
            for output in outputs:
                output.token_ids = output.token_ids[self._num_sent :]
                output.logprobs = output.logprobs and output.logprobs[self._num_sent :]
        return outputs
