"""Locates the model of a command, with progress bars for downloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.config.model_options import DEFAULT_MODEL
from octavo.config.paths import expand_path, path_exists, public_name


def with_local_model(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with `model` as a local path, served under the name that the user
    gave.
    """
    from octavo.checkpoint.catalogue import resolve

    name = options.get("model", DEFAULT_MODEL)
    path = str(resolve(name, progress=True))
    return {"served_model_name": public_name(name), **options, "model": path}


def names_model(text: str) -> bool:
    """Returns whether a command-line word is a model: a short name, an existing directory or .gguf
    file, or a hub repository.
    """
    from octavo.checkpoint.catalogue import short_name
    from octavo.config.model_reference import parse_hub_reference

    if short_name(text) is not None:
        return True
    path = expand_path(text)
    if path_exists(path) and (path.suffix == ".gguf" or path_exists(path / "config.json")):
        return True
    if any(char.isspace() for char in text):
        return False
    return path.suffix == ".gguf" or ("/" in text and parse_hub_reference(text) is not None)


def split_words(words: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    """Splits the arguments of `octavo run [MODEL] [PROMPT]`; None for a missing one.

    With --model all words are the prompt. Otherwise the first of several words is the model; a
    single word is the model if it names one, else the prompt.
    """
    if model is not None or not words:
        return model, " ".join(words) or None
    first, *rest = words
    if rest or names_model(first):
        return first, " ".join(rest) or None
    return None, first
