"""Detects PyTorch, its build and its device, before any module of `executor/torch` is imported.

PyTorch is imported inside the functions, and only if needed.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from octavo.api.errors import BackendUnavailable

Device = Literal["cpu", "cuda"]

LEAST_TORCH = (2, 9)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_SIGNS = (NVIDIA_DRIVER, Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files that exist if there is an NVIDIA driver: the kernel module's version (which some containers
hide), its device, and WSL's device.
"""
INSTALL = "pip install 'octavo[torch]'"
REINSTALL = "pip install --force-reinstall torch"
OLDER_CUDA_INDEX = "https://download.pytorch.org/whl/cu126"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_nvidia_driver(signs: Sequence[Path] = NVIDIA_SIGNS) -> bool:
    """Returns whether the machine has an NVIDIA driver, without importing PyTorch."""
    return any(sign.exists() for sign in signs)


def default_backend() -> Literal["torch", "native"]:
    """Returns torch if it can be used and has a CUDA device, else native."""
    if not has_nvidia_driver() or importlib.util.find_spec("torch") is None:
        return "native"
    try:
        return "torch" if require_torch().cuda.is_available() else "native"
    except BackendUnavailable:
        return "native"


def require_torch() -> Any:
    """Imports PyTorch; raises BackendUnavailable with the command that installs it."""
    try:
        torch = import_torch()
    except (ImportError, OSError) as error:  # OSError: a library that it loads is missing
        raise BackendUnavailable(
            f"the torch backend needs PyTorch 2.9 or newer: {error}", hint=install_hint()
        ) from error
    if parse_version(torch.__version__) < LEAST_TORCH:
        raise BackendUnavailable(
            f"the torch backend needs PyTorch 2.9 or newer, got {torch.__version__}",
            hint=install_hint(),
        )
    return torch


def choose_device(requested: Device | None, *, num_devices: int = 1) -> Device:
    """Returns the requested device; by default cuda if available, else cpu. Raises
    BackendUnavailable if there are fewer than `num_devices`.
    """
    cuda = require_torch().cuda
    if requested == "cuda" and not cuda.is_available():
        build = (
            "this PyTorch is built without CUDA"
            if cuda_build() is None
            else "the driver reports no NVIDIA GPU"
        )
        raise BackendUnavailable(
            f"device: got 'cuda', but {build}",
            hint="run `octavo doctor`; --device cpu works on any machine",
        )
    chosen = requested or ("cuda" if cuda.is_available() else "cpu")
    if chosen == "cuda" and num_devices > 1 and cuda.device_count() < num_devices:
        what = (
            f"tensor_parallel_size: got {num_devices}, but there are {cuda.device_count()} CUDA"
            " devices"
        )
        raise BackendUnavailable(what, hint="use fewer; --device cpu supports any number")
    return chosen


def driver_version(driver: Path = NVIDIA_DRIVER) -> str | None:
    """Returns the version of NVIDIA's kernel module; None if it reports none."""
    match = (
        re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", driver.read_text())
        if driver.exists()
        else None
    )
    return match[1] if match else None


def cuda_build() -> str | None:
    """Returns the CUDA version of the installed PyTorch; None for a build without CUDA."""
    build = import_torch().version.cuda
    return None if build is None else str(build)


def install_hint() -> str:
    """Returns the command that installs the build for this machine."""
    if has_nvidia_driver():
        return f"{INSTALL} (the build with CUDA, which is PyPI's on Linux)"
    return (
        f"{INSTALL} --extra-index-url {CPU_INDEX} (the build for CPUs; this machine shows no NVIDIA"
        " driver)"
    )


def no_device_hint() -> str | None:
    """Returns the hint to install a CUDA build if there is a driver but PyTorch finds no device;
    None without a driver.
    """
    if not has_nvidia_driver():
        return None
    build = cuda_build()
    if build is None:  # pip keeps an installed build unless forced to replace it
        return f"{REINSTALL} (the build with CUDA, which is PyPI's on Linux)"
    return (
        f"the driver may be too old for CUDA {build}: a newer one, or {REINSTALL} --index-url"
        f" {OLDER_CUDA_INDEX}"
    )


def parse_version(text: str) -> tuple[int, int]:
    """Returns (major, minor) of a version such as 2.13.0+cpu."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def import_torch() -> Any:
    """Imports PyTorch, of any version; raises ImportError or OSError if it cannot be loaded."""
    import torch

    return torch
