"""Whether Triton's kernels run on a device, and the device's name in the table of tiles. Does not
import Triton.

On a CPU they run in Triton's NumPy interpreter: slow, for tests. It must be selected before Triton
is imported.
"""

from __future__ import annotations

import importlib.util
import os

import torch

INTERPRETER = "interpreter"
INSTALL = "pip install 'octavo[triton]'"
PLAIN = "--attention-backend sdpa and --torch-kernels plain run on any device"
LEAST_CAPABILITY = (8, 0)
HINT_ON_CPU = f"{PLAIN}; TRITON_INTERPRET=1 in the environment runs the kernels slowly on a CPU"


def is_interpreted() -> bool:
    """Returns whether the environment enables Triton's interpreter, by Triton's own rule."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def unsupported_reason(device: torch.device) -> tuple[str, str] | None:
    """Returns the reason why the kernels cannot run on a device and a hint, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", f"{INSTALL}; {PLAIN}"
    if is_interpreted():
        return None
    if device.type != "cuda":
        return f"Triton has no kernels for the device {device.type}", HINT_ON_CPU
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return (
            f"Triton requires compute capability 8.0, the device has"
            f" {'.'.join(map(str, capability))}",
            PLAIN,
        )
    return None


def device_name(device: torch.device) -> str:
    """Returns the device's name in the table: its compute capability such as sm_90, or the
    interpreter.
    """
    if device.type != "cuda" or is_interpreted():
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
