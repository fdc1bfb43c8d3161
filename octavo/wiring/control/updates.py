"""Writes the model of a weight update, and checks that a running engine can continue with it.

Knows nothing of engine processes and of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octavo.api.errors import InvalidRequest, SetupError
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.writing.updated_model import check_updatable, write_updated_model
from octavo.config.engine_config import EngineConfig
from octavo.wiring.model import open_model

SAME_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""Keys of config.json in which an updated model cannot differ."""


def check_files(config: EngineConfig) -> None:
    """Raises InvalidRequest if tensors of the configured model cannot be replaced."""
    with _as_invalid_request():
        check_updatable(open_model(config).checkpoint)


def write_update(config: EngineConfig, files: Sequence[Path], folder: Path) -> None:
    """Writes the configured model to `folder`, with the tensors of safetensors `files`."""
    with _as_invalid_request():
        checkpoint = open_model(config).checkpoint
        write_updated_model(checkpoint, files, folder, keeps_types=config.model.dtype == "auto")


def check_updated(config: EngineConfig, updated: EngineConfig) -> None:
    """Raises InvalidRequest if an engine with one config cannot continue with the other: if the
    files are not complete or belong to another architecture.
    """
    with _as_invalid_request():
        old, new = open_model(config), open_model(updated)
        check_tensors(new.checkpoint, new.programs())
    for key in SAME_KEYS:
        was, got = old.checkpoint.config.get(key), new.checkpoint.config.get(key)
        if was != got:
            raise InvalidRequest(
                f"{updated.model.model}: its {key} is {got}, expected {was}",
                hint="update the weights of the served architecture only",
            )


@contextmanager
def _as_invalid_request() -> Iterator[None]:
    """Raises the errors of a model as those of the request that names it."""
    try:
        yield
    except SetupError as error:
        raise InvalidRequest(error.message, hint=error.hint) from None
