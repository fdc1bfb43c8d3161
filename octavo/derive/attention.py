"""Lowers attention: calls of transformers' attention interface, latent attention (MLA), and scores,
softmax and values that a model computes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from octavo.derive.capture import AttentionMask, Captured, keys_seen
from octavo.derive.formulas import FAR_TOLERANCE, are_equal
from octavo.derive.graph import MOVES, SAME, TracedGraph, name_of
from octavo.derive.regions import draw
from octavo.derive.rows import RowMap
from octavo.derive.state import LoweringState
from octavo.program.ops import AlibiBias, Attention, MaskKind, MlaAttention
from octavo.program.program import CacheGroup, GroupKind, Value, Weight

SOFTMAX = frozenset(("aten.softmax", "aten._softmax", "aten._safe_softmax"))

MAX_REGION = 20
"""Maximum number of nodes between attention scores and their softmax."""

PRODUCTS = frozenset(("aten.matmul", "aten.bmm", "aten.baddbmm"))


class AttentionDeriver:
    """Lowers the attention of one graph."""

    def __init__(self, state: LoweringState, own_masks: Sequence[AttentionMask] | None) -> None:
        self._state = state
        self._graph = state.graph
        self._emitter = state.emitter
        self.num_own = 0
        """Number of layers whose attention the model computes without transformers' interface."""
        self._own_masks = own_masks
        self._groups: dict[tuple[GroupKind, int, int, int, int | None], tuple[str, int]] = {}
        self._layers: dict[Any, tuple[str, int]] = {}

    def groups(self) -> tuple[CacheGroup, ...]:
        return tuple(
            CacheGroup(name, kind, count, heads, k_width, v_width, window=window)
            for (kind, heads, k_width, v_width, window), (name, count) in self._groups.items()
        )

    def lower(self, node: Node) -> None:
        """Lowers a call of the attention interface."""
        q, k, v, sinks, scale, mask_index, softcap = cast(Any, node.args)
        for each in (q, k, v):
            if not isinstance(self._state.rows.get(each), RowMap):
                raise self._state.rejected(each)
        mask = self._state.captured.masks[mask_index]
        is_plain = mask.kind == "causal" and sinks is None and not softcap
        if is_plain and self._lower_latent(node, q, k, v, scale):
            return
        weights = self._state.weights
        out = self._attend(
            [self._state.rows[each] for each in (q, k, v)],
            scale,
            mask,
            softcap=softcap or None,
            sinks=None if sinks is None else weights.whole(weights.vector(sinks) or str(sinks)),
        )
        self._state.anchor(node, out)

    def _attend(
        self,
        qkv: list[RowMap],
        scale: float,
        mask: AttentionMask,
        *,
        softcap: float | None = None,
        sinks: Weight | None = None,
        bias: AlibiBias | None = None,
    ) -> Value:
        """Appends attention; the row maps of q, k and v end in the axes `[H, D]`."""
        q, *every = (_heads(rows) for rows in qkv)
        k, v = (_distinct_heads(each) for each in every)
        if len(k) != len(v):
            k, v = every
        size = mask.size if mask.kind in ("window", "chunk") else None
        kind: GroupKind = "full" if size is None else "window"
        key = (tuple(k.reshape(-1).tolist()), tuple(v.reshape(-1).tolist()))
        is_new = key not in self._layers
        if is_new:
            self._layers[key] = self.new_layer(kind, len(k), (k.shape[1], v.shape[1]), size)
        group, layer = self._layers[key]
        if is_new:
            self._emitter.kv_write(group, layer, (self._value(k),), self._value(v))
        out = self._emitter.value("attention", "tokens", len(q) * v.shape[1])
        self._emitter.append(
            Attention(
                q=self._value(q),
                out=out,
                group=group,
                layer=layer,
                num_heads=len(q),
                scale=scale,
                mask=cast(MaskKind, mask.kind),
                window=size,
                softcap=softcap,
                sinks=sinks,
                bias=bias,
            )
        )
        return out

    def _value(self, columns: torch.Tensor) -> Value:
        return self._emitter.value_of(RowMap(columns, 0, self._state.num_tokens))

    def new_layer(
        self, kind: GroupKind, heads: int, widths: tuple[int, int], size: int | None
    ) -> tuple[str, int]:
        """Adds a layer of keys and values; returns its cache group and its index in the group."""
        key = (kind, heads, *widths, size)
        number = 1 + sum(other[0] == kind for other in self._groups)
        new = kind if number == 1 else f"{kind}{number}"
        name, layer = self._groups.get(key, (new, 0))
        self._groups[key] = (name, layer + 1)
        return name, layer

    # -- latent attention --------------------------------------------------------------------------

    def _lower_latent(self, node: Node, q: Node, k: Node, v: Node, scale: float) -> bool:
        """Lowers latent attention (MLA, DeepSeek-V2, section 2.1): keys and values are matmuls of a
        latent, except for a rotary part that all heads share. Returns False for other attention.
        """
        rows = self._state.rows | self._state.moved
        queries, keys, values = (_heads(rows[each]) for each in (q, k, v))
        num_heads, width = keys.shape
        shared = (keys == keys[:1]).all(0)
        nope = int((~shared).sum())
        if num_heads < 2 or not 0 < nope < width or bool(shared[:nope].any()):
            return False
        parts = torch.cat((keys[:, :nope], values), 1).reshape(-1)
        latent = self._emitter.product_of(parts) if len(values) == num_heads else None
        rotary = self._emitter.owner(keys[0, nope:])
        turned = self._emitter.owner(queries[:, nope:].reshape(-1))
        if latent is None or rotary is None or turned is None:
            return False
        order, heads = rotary[1], torch.arange(num_heads)[:, None] * (width - nope)
        if sorted(order.tolist()) != [*range(rotary[0].width)] or not torch.equal(
            turned[1].reshape(num_heads, -1), heads + order
        ):
            return False
        kv_b = self._state.weights.rows_of(latent.matrix, range(latent.matrix.outputs))
        if len(kv_b) != 1 or latent.bias is not None:
            return False
        group, layer = self.new_layer("latent", 1, (latent.matrix.inputs + width - nope, 0), None)
        self._emitter.kv_write(group, layer, (latent.x, rotary[0]), None)
        out = self._emitter.value("attention", "tokens", values.numel())
        self._emitter.append(
            MlaAttention(
                q_nope=self._value(queries[:, :nope]),
                q_rope=turned[0],
                out=out,
                kv_b=kv_b[0],
                group=group,
                layer=layer,
                num_heads=num_heads,
                nope_width=nope,
                rope_width=width - nope,
                latent_width=latent.matrix.inputs,
                v_width=values.shape[1],
                scale=scale,
            )
        )
        self._state.anchor(node, out)
        return True

    # -- attention without the interface -----------------------------------------------------------

    def lower_product(self, node: Node) -> bool:
        """Lowers a matmul of softmax weights and values; returns False for another matmul."""
        if name_of(node) == "aten.baddbmm" or len(node.args) < 2:
            return False
        weights, v = node.args[:2]
        while isinstance(weights, Node) and name_of(weights) in SAME | MOVES:
            weights = weights.args[0]
        if not isinstance(weights, Node) or name_of(weights) not in SOFTMAX:
            return False
        scores = find_scores(self._graph, weights)
        if scores is None:
            return False
        q, k = scores.args[-2:]
        maps = [self._state.rows.get(cast(Node, each)) for each in (q, k, v)]
        if not all(isinstance(each, RowMap) for each in maps):
            return False
        found = self._rule(weights, cast(Node, q), cast(Node, k))
        if found is None:
            raise self._state.rejected(weights, f"attention of another kind ({weights.name})")
        scale, bias = found
        mask = AttentionMask("causal") if self._own_masks is None else self._own_masks[self.num_own]
        self.num_own += 1
        out = self._attend(cast(Any, maps), scale, mask, bias=bias)
        shape = self._graph.shape(node)
        self._state.set_result(node, out, len(shape) - 2)
        self._state.anchors.add(node)
        return True

    def _rule(self, softmax: Node, q: Node, k: Node) -> tuple[float, AlibiBias | None] | None:
        """Identifies the scale and the bias of causal attention by its weights' values; None if
        they are of another kind.
        """
        if self._graph.cone(softmax, [q, k])[1]:
            return None
        q_rows, k_rows = self._state.rows[q], self._state.rows[k]
        count, heads = self._state.num_tokens, _heads(q_rows).shape[0]

        def weights(seed: int, spread: float, *, is_far: bool = False) -> tuple[Any, Any]:
            queries = draw((count, q_rows.columns.numel()), seed) * spread
            keys = draw((count, k_rows.columns.numel()), seed + 1)
            given = {q: q_rows.tensor(queries), k: k_rows.tensor(keys)}
            found = self._graph.run(softmax, given, {}, is_far=is_far)
            return found.reshape(heads, count, count), _scores_of(given[q], given[k], heads)

        causal = torch.ones(count, count).tril().bool()
        flat, _ = weights(20, 0.0)
        if not are_equal(flat, weights(20, 0.0, is_far=True)[0], FAR_TOLERANCE):
            return None
        logs = flat.log()
        slopes = (logs[:, -1, -1] - logs[:, -1, -2]).round(decimals=12)
        distance = torch.arange(count)[None, :] - torch.arange(count)[:, None]
        biases = slopes[:, None, None] * distance
        found, scores = weights(21, 1.0)
        logs = found.log()
        rise = (logs[:, -1, -1] - logs[:, -1, -2]) - slopes
        scale = float((rise / (scores[:, -1, -1] - scores[:, -1, -2])).median())
        for seed, spread in ((22, 0.1), (23, 1.0), (24, 5.0)):
            for is_far in (False, True):
                found, scores = weights(seed, spread, is_far=is_far)
                expected = (scores * scale + biases).masked_fill(~causal, -torch.inf).softmax(-1)
                if not are_equal(found, expected, FAR_TOLERANCE):
                    return None
        return scale, AlibiBias((*slopes.tolist(),)) if bool(slopes.any()) else None


def find_scores(graph: TracedGraph, softmax: Node) -> Node | None:
    """Returns the matmul of queries and keys that a softmax reads; None if there is none."""
    count = graph.shape(softmax)[-1]
    stack, seen = [softmax], {softmax}
    while stack and len(seen) < MAX_REGION:
        each = stack.pop(0)
        if name_of(each) in PRODUCTS and graph.shape(each)[-2:] == (count, count):
            return each
        new = {node for node in each.all_input_nodes if node in graph.dynamic} - seen
        seen |= new
        stack += new
    return None


def find_own_masks(captured: Captured) -> list[AttentionMask] | None:
    """Returns the masks of the attention that a model computes itself, in order, identified in a
    text of the captured length; None if one is neither causal nor a window.
    """
    graph = TracedGraph(captured)
    masks = []
    for node in graph.nodes:
        scores = find_scores(graph, node) if name_of(node) in SOFTMAX else None
        if scores is None:
            continue
        zeros = torch.zeros(graph.shape(scores), dtype=torch.float64)
        seen = graph.run(node, {scores: zeros}, {}) > 0
        count = seen.shape[-1]
        size = int(seen.reshape(-1, count)[-1].sum())
        mask = AttentionMask("causal") if size == count else AttentionMask("window", size)
        positions = torch.arange(count)
        if not bool((seen == keys_seen(mask, positions[:, None], positions)).all()):
            return None
        masks.append(mask)
    return masks


def _scores_of(q: torch.Tensor, k: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns products `[H, T, T]` of queries and transposed keys."""
    return (q @ k).reshape(heads, q.shape[-2], k.shape[-1])


def _heads(rows: RowMap) -> torch.Tensor:
    """Returns the columns `[H, D]` of a row map of queries, keys or values."""
    return rows.columns.reshape(-1, rows.columns.shape[-1])


def _distinct_heads(columns: torch.Tensor) -> torch.Tensor:
    """Returns the distinct heads of `[H, D]`, if each is repeated equally often in a row."""
    count = len(columns)
    for kept in (each for each in range(1, count) if count % each == 0):
        if torch.equal(columns[:: count // kept].repeat_interleave(count // kept, 0), columns):
            return columns[:: count // kept]
    return columns
