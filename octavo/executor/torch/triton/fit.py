"""Reduces attention tiles to a device's shared memory if the table has none measured on it.

Contents of a program's shared memory, as compiled for capabilities 8.0 to 9.0 (Triton 3.9), in
numbers of the product's type:

    queries [M, k]   keys [N, k]   values [N, v]   weights [M, N]      fp32: all of them at once;
    halves: at most all of them and less than 1 KiB for what its warps tell one another

A program may use 227 KiB (H100), 163 KiB (A100) or 99 KiB (RTX 30 and 40, L4, L40): heads of 256 in
fp32 and latents of 576 do not fit on every GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from octavo.api.errors import BackendUnavailable

LEAST = 16
"""Smallest number of rows and columns of a product tile."""

WARPS_BYTES = 1 << 10

LEAST_SHARED_BYTES = 99 << 10
"""Shared memory per program if PyTorch does not report it: the smallest among current GPUs."""


def shared_bytes(device: torch.device) -> int | None:
    """Returns a GPU's shared memory per program in bytes; None on other devices: the interpreter
    has no limit.
    """
    if device.type != "cuda":
        return None
    num_bytes = getattr(
        torch.cuda.get_device_properties(device),
        "shared_memory_per_block_optin",
        LEAST_SHARED_BYTES,
    )
    return int(num_bytes)


def attention_bytes(m: int, n: int, widths: tuple[int, int], itemsize: int) -> int:
    """Returns an upper bound of a tile's shared memory in bytes; `widths` are those of a key tile
    and a value tile.
    """
    return itemsize * ((m + n) * widths[0] + n * widths[1] + m * n) + WARPS_BYTES


def fitted(
    launch: Mapping[str, int],
    widths: tuple[int, int],
    itemsize: int,
    most_bytes: int,
    *,
    keep_rows: bool = False,
) -> dict[str, int]:
    """Halves BLOCK_N or BLOCK_M, the larger first, until the launch fits; with `keep_rows` only
    BLOCK_N.

    Raises BackendUnavailable if the smallest tile does not fit.
    """
    m, n = launch["BLOCK_M"], launch["BLOCK_N"]
    while (needed := attention_bytes(m, n, widths, itemsize)) > most_bytes:
        if n > LEAST and (n >= m or keep_rows):
            n //= 2
        elif m > LEAST and not keep_rows:
            m //= 2
        else:
            raise BackendUnavailable(
                f"attention_backend: {too_large(widths, needed, most_bytes)}",
                hint="use --attention-backend sdpa, which has no such limit",
            )
    return {**launch, "BLOCK_M": m, "BLOCK_N": n}


def too_large(widths: tuple[int, int], needed: int, most_bytes: int) -> str:
    tiles = f"Triton's smallest tiles of keys {widths[0]} wide (values {widths[1]})"
    return f"{tiles} take {needed} bytes of shared memory, the device has {most_bytes}"


def unsupported_reason(widths: tuple[int, int], itemsize: int, most_bytes: int) -> str | None:
    """Returns the reason why no tile fits; None if one does."""
    needed = attention_bytes(LEAST, LEAST, widths, itemsize)
    return too_large(widths, needed, most_bytes) if needed > most_bytes else None


def fitted_rows(
    launch: Mapping[str, int], widths: tuple[int, int], most_bytes: int
) -> dict[str, int]:
    """Halves the rows of a launch until some keys fit in any dtype, because shared runs are planned
    before the dtype is known.
    """
    m = launch["BLOCK_M"]
    while m > LEAST and attention_bytes(m, LEAST, widths, torch.float32.itemsize) > most_bytes:
        m //= 2
    return {**launch, "BLOCK_M": m}
