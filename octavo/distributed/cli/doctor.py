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
    use = "--kv-transfer mooncake and --kv-pool"
    yield _find("Mooncake", shown, use, require_mooncake)
    nixl = find_version("nixl", "nixl-cu12")
    yield _find("NIXL", nixl, "--kv-transfer nixl", require_nixl)
    yield _find("Ray", find_version("ray"), "octavo cluster")


def _find(
    name: str, version: str | None, use: str, require: Callable[[], None] = lambda: None
) -> Finding:
    """Reports a package and whether it can be imported; `use` names what requires it."""
    if version is None:
        return Finding(
            name,
            f"not installed; required by {use}",
            status="none",
            hint=f"pip install 'octavo[{name.lower()}]'",
        )
    try:
        require()
    except BackendUnavailable as error:
        return Finding(name, error.message, status="warning", hint=error.hint)
    return Finding(name, version)
