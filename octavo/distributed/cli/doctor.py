"""Checks of `octavo doctor` for Mooncake, NIXL and Ray: versions, and whether they can be
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.api.errors import BackendUnavailable
from octavo.cli.doctor import Finding, find_version


def distributed_findings() -> Iterator[Finding]:
    from octavo.distributed.transfer.mooncake_mover import require_mooncake
    from octavo.distributed.transfer.nixl_mover import require_nixl

    mooncake = find_version("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    shown = mooncake and f"transfer engine {mooncake}"
    need = "--kv-transfer mooncake and --kv-pool need it"
    yield _find("Mooncake", shown, need, require_mooncake)
    nixl = find_version("nixl", "nixl-cu12")
    yield _find("NIXL", nixl, "--kv-transfer nixl needs it", require_nixl)
    yield _find("Ray", find_version("ray"), "octavo cluster needs it")


def _find(
    name: str, version: str | None, need: str, require: Callable[[], None] = lambda: None
) -> Finding:
    """Reports a package and whether it can be imported; `need` is the feature that requires it."""
    if version is None:
        return Finding(name, f"not installed; {need}", hint=f"pip install 'octavo[{name.lower()}]'")
    try:
        require()
    except BackendUnavailable as error:
        return Finding(name, error.message, ok=False, hint=error.hint)
    return Finding(name, version)
