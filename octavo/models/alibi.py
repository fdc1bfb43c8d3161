"""ALiBi slopes per head. Press et al. 2022."""

from __future__ import annotations

import math

from octavo.program.ops import AlibiBias


def alibi(num_heads: int, *, most: float = 8.0, factor: float = 1.0) -> AlibiBias:
    """Returns slopes that fall geometrically from 2^(-most / heads) to 2^-most.

    If the number of heads is no power of two, the remaining heads use the odd steps of the next
    power of two.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-most * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-most * (2 * i + 1) / (2 * whole)) for i in range(num_heads - whole)]
    return AlibiBias(tuple(slope * factor for slope in (*slopes, *between)))


def interleaved_alibi(num_heads: int, *, most: float = 8.0) -> AlibiBias:
    """Returns slopes in MPT's order: the odd steps of the next power of two, then the even ones."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-most * (i + 1) / whole) for i in range(whole)]
    if whole != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]][:num_heads]
    return AlibiBias(tuple(slopes))
