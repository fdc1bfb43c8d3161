"""The device and its software, and upper bounds on its speed: bytes of a large copy, operations of
a large product in bf16 and in fp8.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from typing import Any

import torch

from benchmarks.on_gpu.settings import Emit, Settings
from benchmarks.on_gpu.timing import seconds

PACKAGES = ("torch", "triton", "transformers", "numpy", "octavo", "msgspec")
COPY_BYTES = 4 << 30
SIDE = 8192


def section(settings: Settings, emit: Emit) -> None:
    device = torch.device(settings.device)
    emit(machine(device))
    count = (1 << 20) if settings.tiny else COPY_BYTES
    copied_s = copy_s(count, device)
    side = 128 if settings.tiny else SIDE
    emit(
        {
            "ceilings": {
                "bandwidth": 2 * count / copied_s,
                "bf16": 2 * side**3 / product_s(side, device),
                "fp8": _fp8_rate(side, device),
            },
            "copy_bytes": count,
            "side": side,
        }
    )


def copy_s(num_bytes: int, device: torch.device) -> float:
    source, target = (
        torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device) for _ in range(2)
    )
    return seconds(lambda: target.copy_(source), device)


def product_s(side: int, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return seconds(lambda: a @ b.T, device)


def _fp8_rate(side: int, device: torch.device) -> float | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return (
        2
        * side**3
        / seconds(
            lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
            device,
        )
    )


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what a reader must know to compare results."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        from octavo.executor.devices import driver_version

        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
        }
        found |= {"cuda": torch.version.cuda, "driver": driver_version()}
    return found | {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
