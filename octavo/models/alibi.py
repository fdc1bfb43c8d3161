"""Slopes of ALiBi by head, as the families compute them. Press et al. 2022."""

from __future__ import annotations

import math

from octavo.program.ops import AlibiBias


def alibi(num_heads: int, *, most: float = 8.0, factor: float = 1.0) -> AlibiBias:
    """Returns the bias whose slopes fall as powers of two from 2^(-most / heads) to 2^-most; where
    the heads are no power of two, those left over take the odd steps of twice as many.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-most * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-most * (2 * i + 1) / (2 * whole)) for i in range(num_heads - whole)]
    return AlibiBias(tuple(slope * factor for slope in (*slopes, *between)))


def interleaved_alibi(num_heads: int, *, most: float = 8.0) -> AlibiBias:
    """Returns MPT's order: of the next power of two's slopes the odd steps, then the even ones."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-most * (i + 1) / whole) for i in range(whole)]
    if whole != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]][:num_heads]
    return AlibiBias(tuple(slopes))
