"""The passes that every executor runs a Program through: fewer and larger ops, on no more rows than
are wanted, with the same results.
"""

from octavo.program.passes.fuse import fuse
from octavo.program.passes.gather_early import gather_early
from octavo.program.program import Program


def optimize(program: Program) -> Program:
    """Applies all passes that every executor wants, in their order."""
    return gather_early(fuse(program))
