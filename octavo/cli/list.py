"""`octavo list`: the models in the caches of this machine."""

from __future__ import annotations

import time

from octavo.config.sizes import format_bytes


def list() -> None:
    """List the models on this machine, the newest first."""
    from octavo.checkpoint.local_models import list_local_models
    from octavo.cli.columns import format_columns

    found = list_local_models()
    rows = [
        (
            model.name,
            format_bytes(model.num_bytes),
            model.quantization or "-",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_s)),
        )
        for model in found
    ]
    print(format_columns(("NAME", "SIZE", "QUANTIZATION", "MODIFIED"), rows))
    if not found:
        from octavo.progress import to_stderr

        to_stderr("no models yet: `octavo pull smollm2` fetches the default one")
