from octavo.program.passes.fuse import fuse
from octavo.program.passes.gather_early import gather_early
from octavo.program.program import Program


def optimize(program: Program) -> Program:
    """Applies the passes that every backend uses."""
    return gather_early(fuse(program))
