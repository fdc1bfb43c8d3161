"""Selects attention kernels by the option `attention_backend`, the device, and what the kernels
support.

The only module that refers to all kernel sets. Triton is imported only when selected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from octavo.api.errors import BackendUnavailable
from octavo.executor.base import BackendOptions
from octavo.executor.torch.attention.call import AttentionKernels
from octavo.executor.torch.attention.sdpa import Sdpa
from octavo.executor.torch.triton.device import is_interpreted
from octavo.executor.torch.triton.device import unsupported_reason as triton_unsupported_reason
from octavo.program import ops
from octavo.program.program import Program

logger = logging.getLogger(__name__)


def _triton_on(options: BackendOptions, device: torch.device) -> AttentionKernels:
    if unsupported := triton_unsupported_reason(device):
        why, hint = unsupported
        raise BackendUnavailable(f"attention_backend: got 'triton', but {why}", hint=hint)
    from octavo.executor.torch.triton.attention import TritonAttention
    from octavo.executor.torch.triton.fit import shared_bytes

    return TritonAttention(
        device,
        fixed_tiles=options.batch_invariant,
        share_prefixes=options.shared_prefix_attention,
        shared_bytes=None if is_interpreted() else shared_bytes(device),
    )


MAKERS: dict[str, Callable[[BackendOptions, torch.device], AttentionKernels]] = {
    "triton": _triton_on,
    "sdpa": lambda options, device: Sdpa(heads_apart=options.batch_invariant),
}
"""Constructors by the value of `attention_backend`; each raises BackendUnavailable if its kernels
cannot run."""


def choose_attention(options: BackendOptions, device: torch.device) -> tuple[AttentionKernels, ...]:
    """Returns the kernels to try, in order.

    "auto" on CUDA is triton if available, with sdpa as fallback; elsewhere sdpa.
    """
    if options.attention_backend != "auto":
        return (MAKERS[options.attention_backend](options, device),)
    sdpa = MAKERS["sdpa"](options, device)
    if device.type != "cuda":
        return (sdpa,)
    try:
        return MAKERS["triton"](options, device), sdpa
    except BackendUnavailable as error:
        logger.warning("using sdpa for attention: %s", error.message)
        return (sdpa,)


def first_that_computes(
    choices: Sequence[AttentionKernels], program: Program, kv_dtype: torch.dtype
) -> AttentionKernels:
    """Returns the first kernels that support all of a Program's attention, and logs why others do
    not.

    Raises BackendUnavailable with every reason if none does.
    """
    unsupported: list[str] = []
    for choice in choices:
        calls = [op for op in program.ops if isinstance(op, ops.Attention | ops.MlaAttention)]
        reasons = {
            why for op in calls if (why := choice.unsupported_reason(op, kv_dtype)) is not None
        }
        if not reasons:
            if unsupported:
                logger.warning(
                    "attention of the %s uses %s: %s",
                    program.name,
                    choice.name,
                    "; ".join(unsupported),
                )
            return choice
        unsupported.append(f"{choice.name}: {', '.join(sorted(reasons))}")
    raise BackendUnavailable(
        f"the torch backend cannot run attention with {'; '.join(unsupported)} (in {program.name})",
        hint="use --attention-backend auto, or --backend native on CPUs",
    )
