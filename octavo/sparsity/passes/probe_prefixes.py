"""Probe_prefixes pass: stores one layer's keys a second time, in a separate cache group, to score
the blocks of a stored prefix; also extracts the part of the Program that computes this layer's
queries.

The group's blocks are saved and fetched like others, but before them. Runs on the complete Program,
before the other passes. Source: IMPRESS (Chen et al. 2025, FAST), which probes three heads of every
layer. Here all heads of one layer are used instead, because a file block contains all heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.api.errors import ConfigError
from octavo.program.ops import Attention, KvWrite, MlaAttention, Rope
from octavo.program.passes.stages import extract_part
from octavo.program.program import CacheGroup, Op, Program, Value

GROUP = "prefix_probe"

DEPTH = 0.4
"""Depth of the probed layer, as a fraction of the number of layers."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The probed layer; queries and keys have the same head size."""

    group: int
    """Index of the cache group that stores its keys."""
    num_heads: int
    num_kv_heads: int
    scale: float


def probe_prefixes(program: Program) -> Program:
    """Returns the Program that also stores one layer's keys; raises ConfigError if it cannot."""
    op = _get_probed_attention(program)
    group = program.group(op.group)
    own = CacheGroup(GROUP, "full", 1, group.num_kv_heads, group.k_width, 0)
    keys = _keys(program, op)
    ops: list[Op] = []
    for each in program.ops:
        if each is op:
            ops.append(KvWrite((keys.k_parts[0],), None, GROUP, 0))
        ops.append(each)
    result = replace(program, ops=tuple(ops), groups=(*program.groups, own))
    result.check()
    return result


def get_probe(program: Program) -> Probe:
    """Returns the probe that `probe_prefixes` added to a Program."""
    op = _get_probed_attention(program)
    group = program.group(op.group)
    return Probe(program.group_index(GROUP), op.num_heads, group.num_kv_heads, op.scale)


def probing_part(program: Program) -> Program:
    """Returns the part of a Program that computes the probed layer's queries, `[T, H * D]`."""
    op = _get_probed_attention(program)
    needed: set[Value] = {op.q}
    read: set[tuple[str, int]] = set()
    ops: list[Op] = []
    before = next(at for at, each in enumerate(program.ops) if each is op)
    for each in reversed(program.ops[:before]):
        if isinstance(each, KvWrite):
            if (each.group, each.layer) not in read:
                continue
        elif needed.isdisjoint(each.outputs):
            continue
        if isinstance(each, Attention):
            read.add((each.group, each.layer))
        needed.update(each.inputs)
        ops.append(each)
    part = extract_part(program, tuple(reversed(ops)), program.inputs, {"hidden": op.q})
    return replace(part, groups=tuple(group for group in part.groups if group.num_layers))


def _get_probed_attention(program: Program) -> Attention:
    """Returns the attention of the probed layer."""
    attentions = [op for op in program.ops if isinstance(op, Attention | MlaAttention)]
    kinds = {group.kind for group in program.groups if group.name != GROUP}
    if kinds != {"full"} or not attentions:
        other = min(kinds - {"full"}, default="no keys")
        raise _config_error(
            program, f"it keeps {other}, which does not let go of some tokens alone"
        )
    for op in attentions:
        if isinstance(op, MlaAttention) or op.latent_width:
            raise _config_error(program, "it keeps latents, of which no head has keys of its own")
        if op.mask != "causal" or op.bias is not None:
            raise _config_error(program, "what a token reads depends on the positions of keys")
    if any(isinstance(op, Rope) and op.table.axes for op in program.ops):
        raise _config_error(program, "its positions have several axes")
    if len(attentions) == 1:
        raise _config_error(program, "it has one layer, and nothing before it to make queries of")
    attention = attentions[max(1, int(DEPTH * len(attentions)))]
    assert isinstance(attention, Attention), "the others were refused"
    return attention


def _keys(program: Program, op: Attention) -> KvWrite:
    """Returns the KvWrite of the keys that an attention reads."""
    for each in program.ops:
        if isinstance(each, KvWrite) and (each.group, each.layer) == (op.group, op.layer):
            if len(each.k_parts) == 1:
                return each
            break
    raise _config_error(program, "its keys are several parts")


def _config_error(program: Program, why: str) -> ConfigError:
    return ConfigError(
        f"prefix_cache_policy: importance is not supported by {program.name}: {why}",
        hint="remove prefix_cache_policy",
    )
