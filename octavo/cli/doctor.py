"""`octavo doctor`: reports what this machine supports and what is missing, with install
commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.api.errors import BackendUnavailable
from octavo.cli.common.style import Status, format_mark, paint
from octavo.config.sizes import format_bytes
from octavo.utils.extensions import load_classes
from octavo.utils.version import __version__

WIDTH = 12
"""Width of the name column."""
MARK_WIDTH = 2
"""Width of the status mark and the space after it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    status: Status = "ok"
    hint: str | None = None

    @property
    def ok(self) -> bool:
        return self.status != "failure"

    def lines(self) -> Iterator[str]:
        yield f"{format_mark(self.status)} {self.name:<{WIDTH}}{self.text}"
        if self.hint is not None:
            yield paint(f"{'':<{MARK_WIDTH + WIDTH}}hint: {self.hint}", dim=True)

    def to_json(self) -> dict[str, str | bool | None]:
        return {"name": self.name, "text": self.text, "ok": self.ok, "hint": self.hint}


def doctor(
    *, json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False
) -> None:
    """Check backends, packages and memory of this machine. The exit code is 1 without a fast
    backend.
    """
    all_findings = list(findings())
    if json:
        import json as json_format

        print(json_format.dumps({finding.name: finding.to_json() for finding in all_findings}))
    else:
        print("\n".join(line for finding in all_findings for line in finding.lines()))
        print(f"\n{_summarize(all_findings)}")
    if not any(finding.ok for finding in all_findings if finding.name in ("native", "torch")):
        raise typer.Exit(1)


def _summarize(all_findings: list[Finding]) -> str:
    """Counts failures and warnings."""
    counts = Counter(finding.status for finding in all_findings)
    statuses: tuple[Status, ...] = ("failure", "warning")
    parts = [
        f"{counts[status]} {status}{'' if counts[status] == 1 else 's'}"
        for status in statuses
        if counts[status]
    ]
    worst: Status = next((status for status in statuses if counts[status]), "ok")
    return f"{format_mark(worst)} {', '.join(parts) or 'no problems found'}"


def findings() -> Iterator[Finding]:
    from octavo.executor.devices import default_backend

    yield Finding(
        "octavo",
        f"{__version__}, Python {platform.python_version()}, {platform.system()}"
        f" {platform.machine()}",
    )
    yield from _machine()
    yield _native()
    yield from _torch()
    for find in load_classes("doctor"):
        yield from find()
    yield Finding("default", f"--backend {default_backend()}")


def _machine() -> Iterator[Finding]:
    from octavo.worker.machine import Machine

    machine = Machine()
    threads, free = machine.num_threads(), machine.available_bytes()
    num_nodes = len(machine.nodes())
    nodes = f", {num_nodes} NUMA nodes" if num_nodes > 1 else ""
    yield Finding(
        "CPU",
        f"{machine.cpu_name()}, {threads} compute thread{'' if threads == 1 else 's'}{nodes}",
    )
    yield Finding(
        "memory",
        "free memory unknown" if free is None else f"{format_bytes(free)} free",
        status="warning" if free is None else "ok",
    )


def _native() -> Finding:
    from octavo.executor.native.extension import supported_levels

    try:
        levels = supported_levels()
    except BackendUnavailable as error:
        return Finding("native", error.message, status="failure", hint=error.hint)
    return Finding("native", f"level {levels[-1]} (supported: {', '.join(levels)})")


def _torch() -> Iterator[Finding]:
    """Checks PyTorch, Triton, the driver and the devices."""
    from octavo.executor import devices

    try:
        torch = devices.require_torch()
    except BackendUnavailable as error:
        yield Finding("torch", error.message, status="failure", hint=error.hint)
    else:
        build = devices.cuda_build()
        yield Finding(
            "torch",
            f"{torch.__version__}, built {'for CPUs' if build is None else f'with CUDA {build}'}",
        )
        yield from _cuda(torch)
    yield _triton()
    if devices.has_nvidia_driver():
        yield Finding("driver", f"NVIDIA {devices.driver_version() or '(unknown version)'}")
    else:
        yield Finding("driver", "no NVIDIA driver", status="none")


def _triton() -> Finding:
    """Reports Triton's version and how many kernels earlier runs have compiled: a new shape of
    model compiles its own before its first request.
    """
    found = find_package(
        "Triton", "triton", missing="not installed; included in PyTorch's CUDA builds"
    )
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    num_kernels = sum(1 for _ in folder.glob("*/*.cubin")) if found.status == "ok" else 0
    if not num_kernels:
        return found
    return dataclasses.replace(
        found, text=f"{found.text}, {num_kernels} compiled kernels in {folder}"
    )


def _cuda(torch: Any) -> Iterator[Finding]:
    from octavo.executor import devices

    cuda = torch.cuda
    if not cuda.is_available():
        hint = devices.no_device_hint()
        yield Finding("CUDA", "no device", status="warning" if hint else "none", hint=hint)
        return
    for index in range(cuda.device_count()):
        free, total = cuda.mem_get_info(index)
        major, minor = cuda.get_device_capability(index)
        memory = f"{format_bytes(free)} free of {format_bytes(total)}"
        yield Finding(
            f"CUDA {index}",
            f"{cuda.get_device_name(index)}, compute capability {major}.{minor}, {memory}",
        )


def find_package(name: str, package: str, *, missing: str) -> Finding:
    """Reports the version of an optional package, or `missing`."""
    version = find_version(package)
    return Finding(name, version or missing, status="ok" if version else "none")


def find_version(*packages: str) -> str | None:
    """Returns the version of the first of these packages that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None
