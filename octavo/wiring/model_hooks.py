"""Hooks of extensions that change a model while it is opened or planned: its tensors, its Programs
and its backend's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.engine.kv.kv_connector import BlockChoiceSpec
from octavo.executor.base import Backend, BackendOptions
from octavo.program.passes.input_rows import accept_input_rows
from octavo.program.program import Program
from octavo.utils.extensions import get_first, get_hooks
from octavo.wiring.tier_builder import TierBuilder
from octavo.worker.kv_connectors.tiers import BlockRater
from octavo.worker.loaded_model import LoadedModel


class SideProgram(NamedTuple):
    """A Program that is prepared in addition to the model's, from the same weights."""

    program: Program
    max_tokens: int


class ModelHooks:
    """Model hooks of one extension. The defaults add nothing."""

    def add_family(self, config: Mapping[str, Any]) -> None:
        """Creates the Programs of a config.json whose model type has no module, if possible."""

    def open_checkpoint(self, config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the tensors that the extension's passes need."""
        return checkpoint

    def open_header(self, config: EngineConfig, header: ModelHeader) -> ModelHeader:
        """Returns a header with these tensors, for planning without weights."""
        return header

    def transform(self, config: EngineConfig, header: ModelHeader, program: Program) -> Program:
        """Returns the unsharded Program with the extension's ops."""
        return program

    def transform_part(
        self, config: EngineConfig, checkpoint: Checkpoint | None, program: Program
    ) -> Program:
        """Adds the extension's ops to one rank's Program. Without a checkpoint, only adds the ops
        that planning needs.
        """
        return program

    def packing(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Returns everything that determines how weights are packed into a file, by name."""
        return {}

    def backend_options(
        self, config: EngineConfig, checkpoint: Checkpoint | None, options: BackendOptions
    ) -> BackendOptions:
        return options

    def check_backend(self, config: EngineConfig, backend: Backend) -> None:
        """Raises ConfigError if the backend does not support the extension's options."""

    def side_program(self, config: EngineConfig, program: Program) -> SideProgram | None:
        """Returns a Program to prepare in addition to the model's; None if there is none."""
        return None

    def block_choice(self, loaded: LoadedModel) -> tuple[BlockChoiceSpec, BlockRater] | None:
        """Returns how requests choose among the stored blocks of their prefix, and the rater of
        blocks; None to load all.
        """
        return None

    def tier_builder(self, config: EngineConfig) -> TierBuilder | None:
        """Returns the builder of the lower tiers of the prefix cache; None if they are host memory
        and files.
        """
        return None


def model_hooks() -> tuple[ModelHooks, ...]:
    return get_hooks("model", ModelHooks)


def transform(config: EngineConfig, header: ModelHeader, program: Program) -> Program:
    """Adds the ops that options and extensions need to the unsharded Program."""
    if config.model.enable_prompt_embeds:
        program = accept_input_rows(program)
    for hooks in model_hooks():
        program = hooks.transform(config, header, program)
    return program


def transform_part(
    config: EngineConfig, checkpoint: Checkpoint | None, program: Program
) -> Program:
    """Adds the ops of all extensions to one rank's Program."""
    for hooks in model_hooks():
        program = hooks.transform_part(config, checkpoint, program)
    return program


def side_program(config: EngineConfig, program: Program) -> SideProgram | None:
    """Returns the Program to prepare in addition to the model's; None if there is none."""
    return get_first(hooks.side_program(config, program) for hooks in model_hooks())


def block_choice(loaded: LoadedModel) -> tuple[BlockChoiceSpec, BlockRater] | None:
    """Returns how requests choose among stored blocks, and their rater; None to load all."""
    return get_first(hooks.block_choice(loaded) for hooks in model_hooks())


def tier_builder(config: EngineConfig) -> TierBuilder | None:
    """Returns an extension's builder of the lower tiers; None if they are host memory and files."""
    return get_first(hooks.tier_builder(config) for hooks in model_hooks())
