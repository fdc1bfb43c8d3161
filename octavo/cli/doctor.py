"""`octavo doctor`: reports what this machine supports and what is missing, with install
commands.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from octavo.api.errors import BackendUnavailable
from octavo.config.sizes import format_bytes
from octavo.utils.extensions import load_classes
from octavo.utils.version import __version__

WIDTH = 12
"""Width of the column of names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    ok: bool = True
    """Whether nothing is missing."""
    hint: str | None = None

    def lines(self) -> Iterator[str]:
        yield f"{self.name:<{WIDTH}}{self.text}"
        if self.hint is not None:
            yield f"{'':<{WIDTH}}hint: {self.hint}"


def doctor(
    *, json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Report what can run here: PyTorch, CUDA, kernels, free memory, the CPU's level. The exit
    code is 1 if no fast backend can run.
    """
    found = list(findings())
    if json:
        import json as json_format

        print(json_format.dumps({finding.name: asdict(finding) for finding in found}))
    else:
        print("\n".join(line for finding in found for line in finding.lines()))
    if not any(finding.ok for finding in found if finding.name in ("native", "torch")):
        raise typer.Exit(1)


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
    yield Finding(
        "CPU", f"{machine.cpu_name()}, {threads} compute thread{'' if threads == 1 else 's'}"
    )
    yield Finding(
        "memory", "the system does not say" if free is None else f"{format_bytes(free)} free"
    )


def _native() -> Finding:
    from octavo.executor.native.extension import supported_levels

    try:
        levels = supported_levels()
    except BackendUnavailable as error:
        return Finding("native", error.message, ok=False, hint=error.hint)
    return Finding("native", f"level {levels[-1]}, of {', '.join(levels)}")


def _torch() -> Iterator[Finding]:
    """Checks PyTorch, Triton, FlashInfer, the driver and the devices."""
    from octavo.executor import devices

    try:
        torch = devices.require_torch()
    except BackendUnavailable as error:
        yield Finding("torch", error.message, ok=False, hint=error.hint)
    else:
        build = devices.cuda_build()
        yield Finding(
            "torch",
            f"{torch.__version__}, built {'for CPUs' if build is None else f'with CUDA {build}'}",
        )
        yield from _cuda(torch)
    yield Finding(
        "Triton", find_version("triton") or "not installed; PyTorch's builds with CUDA bring it"
    )
    flashinfer = find_version("flashinfer-python")
    missing = (
        f"not installed; {devices.INSTALL_FLASHINFER} brings it (--attention-backend flashinfer, on"
        " CUDA)"
    )
    yield Finding("FlashInfer", flashinfer or missing)
    driver = devices.driver_version()
    unknown = (
        "NVIDIA, the system does not say which version"
        if devices.has_nvidia_driver()
        else "no NVIDIA driver"
    )
    yield Finding("driver", unknown if driver is None else f"NVIDIA {driver}")


def _cuda(torch: Any) -> Iterator[Finding]:
    from octavo.executor import devices

    cuda = torch.cuda
    if not cuda.is_available():
        yield Finding("CUDA", "no device", hint=devices.no_device_hint())
        return
    for index in range(cuda.device_count()):
        free, total = cuda.mem_get_info(index)
        major, minor = cuda.get_device_capability(index)
        memory = f"{format_bytes(free)} free of {format_bytes(total)}"
        yield Finding(
            f"CUDA {index}",
            f"{cuda.get_device_name(index)}, compute capability {major}.{minor}, {memory}",
        )


def find_version(*packages: str) -> str | None:
    """Returns the version of the first of these packages that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None
