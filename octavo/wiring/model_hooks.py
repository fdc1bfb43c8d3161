"""Hooks by which extensions change a model while it is opened: its tensors, its Programs, and the
options of its backend.

Called when a model is opened or planned, and not in its steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.engine.kv.block_choice import BlockChoiceSpec
from octavo.executor.base import Backend, BackendOptions
from octavo.program.program import Program
from octavo.utils.extensions import get_first, get_hooks
from octavo.worker.kv_connectors.tiers import BlockRater
from octavo.worker.loaded_model import LoadedModel


class SideProgram(NamedTuple):
    """A Program that is prepared beside the model's, from the same weights."""

    program: Program
    max_tokens: int


class ModelHooks:
    """What one extension adds to a model. The defaults add nothing."""

    def open_checkpoint(self, config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the tensors that the extension's passes need."""
        return checkpoint

    def open_header(self, config: EngineConfig, header: ModelHeader) -> ModelHeader:
        """Returns the header with these tensors, for a plan that reads no weights."""
        return header

    def transform(self, config: EngineConfig, header: ModelHeader, program: Program) -> Program:
        """Returns the whole Program with the extension's ops, before it is split over ranks."""
        return program

    def transform_part(
        self, config: EngineConfig, checkpoint: Checkpoint | None, program: Program
    ) -> Program:
        """Returns one rank's part of the Program with the extension's ops; without a checkpoint,
        what a plan needs of them.
        """
        return program

    def packing(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns what decides how weights are packed into a file, by name."""
        return {}

    def backend_options(
        self, config: EngineConfig, checkpoint: Checkpoint | None, options: BackendOptions
    ) -> BackendOptions:
        """Returns the backend's options with the extension's hooks."""
        return options

    def check_backend(self, config: EngineConfig, backend: Backend) -> None:
        """Raises ConfigError if the backend cannot do what the options ask for."""

    def side_program(self, config: EngineConfig, program: Program) -> SideProgram | None:
        """Returns a Program to be prepared beside the model's."""
        return None

    def block_choice(self, loaded: LoadedModel) -> tuple[BlockChoiceSpec, BlockRater] | None:
        """Returns how requests choose among the stored blocks of their prefix, and what rates these
        blocks; None if they load all.
        """
        return None


def model_hooks() -> tuple[ModelHooks, ...]:
    """Returns the hooks of the installed extensions."""
    return get_hooks("model", ModelHooks)


def transform(config: EngineConfig, header: ModelHeader, program: Program) -> Program:
    """Returns the whole Program with the ops of all extensions."""
    for hooks in model_hooks():
        program = hooks.transform(config, header, program)
    return program


def transform_part(
    config: EngineConfig, checkpoint: Checkpoint | None, program: Program
) -> Program:
    """Returns one rank's part of the Program with the ops of all extensions."""
    for hooks in model_hooks():
        program = hooks.transform_part(config, checkpoint, program)
    return program


def side_program(config: EngineConfig, program: Program) -> SideProgram | None:
    """Returns the Program to be prepared beside the model's; None if there is none."""
    return get_first(hooks.side_program(config, program) for hooks in model_hooks())


def block_choice(loaded: LoadedModel) -> tuple[BlockChoiceSpec, BlockRater] | None:
    """Returns how requests choose among stored blocks, and what rates them; None if they load
    all.
    """
    return get_first(hooks.block_choice(loaded) for hooks in model_hooks())
