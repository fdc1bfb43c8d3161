"""The runners of one model's Programs: one for each kind of row (sampled or pooled), and the
encoder of an encoder-decoder model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.engine.protocol.step import ScheduledRequest, WeightArrivals
from octavo.executor.base import Runnable
from octavo.worker.media.encoder_runner import EncoderRunner
from octavo.worker.model_input import ModelInput, ProgramRunner


class ProgramRunners:
    """Prepares each row with the runner of the Program that the plan names."""

    def __init__(
        self, runners: Mapping[str, ProgramRunner], encoder: EncoderRunner | None = None
    ) -> None:
        self._runners = runners
        is_single = encoder is None and len(runners) == 1
        self.single = next(iter(runners.values())) if is_single else None
        """The only runner, which prepares all rows; None if there are several."""
        self._encoder = encoder
        encoders = [] if encoder is None else [encoder]
        self.runnables = [runner.runnable for runner in [*runners.values(), *encoders]]
        """The prepared Programs."""
        self.streaming: Sequence[Runnable] = [
            runnable for runnable in self.runnables if runnable.arrivals is not None
        ]
        """Programs that read weights from files while they compute."""
        self.compiles = any(each.num_late_compilations is not None for each in self.runnables)
        """Whether kernels are compiled at run time."""

    def get_arrivals(self) -> WeightArrivals:
        """Returns the weights read from files so far."""
        arrivals = WeightArrivals()
        for runnable in self.streaming:
            arrivals = arrivals + (runnable.arrivals or WeightArrivals())
        return arrivals

    @property
    def num_late_compilations(self) -> int:
        """Kernels that this process compiled during steps."""
        return max(runnable.num_late_compilations or 0 for runnable in self.runnables)

    def prepare_inputs(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the first of `num_steps` steps, in the order in which inputs are computed."""
        inputs = [
            each
            for name in dict.fromkeys(row.program for row in scheduled)
            for each in self._runners[name].prepare_inputs(
                [row for row in scheduled if row.program == name], num_steps
            )
        ]
        return inputs if self._encoder is None else self._encoder.prepare_inputs(scheduled) + inputs

    def join(self) -> None:
        """Computes a step without rows, in which the experts compute rows of other engines."""
        for runner in self._runners.values():
            runner.join()
