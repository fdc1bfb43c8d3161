"""`octavo rm MODEL...`: deletes cached models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.checkpoint.local_models import CachedModel


def rm(
    names: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Model names, as shown by `octavo list`"),
    ],
) -> None:
    """Delete models from the cache. If a name is unknown, nothing is deleted."""
    from octavo.checkpoint.local_models import remove_local_model
    from octavo.config.sizes import format_bytes

    models = {model.path: model for model in map(_find, names)}
    for model in models.values():
        remove_local_model(model)
        print(f"removed {model.name}: {format_bytes(model.num_bytes)} freed")


def _find(name: str) -> CachedModel:
    """Returns a cached model; raises ModelNotFound if there is none of that name."""
    import difflib

    from octavo.api.errors import ModelNotFound
    from octavo.checkpoint.local_models import find_local_model, list_local_models
    from octavo.config.paths import expand_path, path_exists

    model = find_local_model(name)
    if model is not None:
        return model
    if name and path_exists(expand_path(name)):
        raise ModelNotFound(
            f"model {name!r}: not in the cache",
            hint="octavo rm deletes only cached models; delete this file or directory yourself",
        )
    known = [known_model.name for known_model in list_local_models()]
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else "run `octavo list` for the cached models"
    raise ModelNotFound(f"model {name!r}: not in the cache", hint=hint)
