"""Layouts of cache groups on any backend, for tests of KV memory that run no model."""

from collections.abc import Sequence

from octavo.executor.base import Backend
from octavo.executor.kv import KvLayout
from octavo.program.builder import Builder
from octavo.program.program import CacheGroup


def layouts_of(backend: Backend, groups: Sequence[CacheGroup]) -> tuple[KvLayout, ...]:
    """Returns the layouts of the groups in a Program of one fp32 product."""
    b = Builder("test", tuple(groups))
    program = b.finish(logits=b.linear(b.gather_rows(b.hidden(8)), "product", 8))
    return backend.footprint(program, lambda weight: "F32").kv_layouts
