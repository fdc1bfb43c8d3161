"""Lowers a captured forward pass to a Program.

Matmuls, embeddings, attention and experts are found by name. Other nodes are lowered if the region
between them and earlier lowered nodes computes the same as an op, which is determined by probing
(`regions.py`). Raises UnsupportedModel if any node remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch.fx import Node

from octavo.derive.capture import AttentionMask, Captured
from octavo.derive.emitter import Emitter, GraphMatmul, remove_unread, sample_rows
from octavo.derive.graph import FAR_POSITION, MOVES, SAME, TracedGraph, call, name_of
from octavo.derive.moe import ExpertDeriver
from octavo.derive.probe import Prober
from octavo.derive.rows import RowMap, rows_of
from octavo.derive.state import LoweringState
from octavo.derive.weights import Matrix, Weights
from octavo.program.ops import Attention, Embedding, MaskKind
from octavo.program.program import CacheGroup, GroupKind, Program, Value


class ProgramLowering:
    """Turns the nodes of one graph into ops."""

    def __init__(self, captured: Captured, config: Mapping[str, Any]) -> None:
        graph = TracedGraph(captured)
        model_type = str(config["model_type"])
        weights = Weights(captured, graph, model_type)
        assert graph.ids is not None
        num_tokens = graph.shape(graph.ids)[1]
        emitter = Emitter(model_type, weights, num_tokens)
        self._state = LoweringState(captured, graph, weights, emitter, config, num_tokens)
        self._graph = graph
        self._weights = weights
        self._emitter = emitter
        self._rows = self._state.rows
        self._prober = Prober(self._state)
        self._experts = ExpertDeriver(self._state)
        self._groups: dict[tuple[GroupKind, int, int, int, int | None], tuple[str, int]] = {}
        self._layers: dict[tuple[Node, Node], tuple[str, int]] = {}
        self._ids = Value("token_ids", "tokens", 1, "int")

    def program(self) -> Program:
        for node in self._graph.nodes:
            if node in self._graph.dynamic:
                self._lower(node)
        logits = self._rows.get(self._graph.output)
        if not isinstance(logits, RowMap):
            raise self._state.rejected(self._graph.output)
        ops, out = sample_rows(self._emitter.ops, self._emitter.value_of(logits))
        groups = tuple(
            CacheGroup(name, kind, count, heads, k_width, v_width, window=window)
            for (kind, heads, k_width, v_width, window), (name, count) in self._groups.items()
        )
        program = Program(
            "decoder",
            {"token_ids": self._ids},
            {"logits": out},
            tuple(remove_unread(ops, out)),
            groups,
            logits.shape[-1],
        )
        program.check()
        return program

    def _lower(self, node: Node) -> None:
        name = name_of(node)
        if name in SAME:
            source = node.args[0]
            if isinstance(source, Node) and source in self._rows:
                self._rows[node] = self._rows[source]
            return
        if name in MOVES and self._move(node):
            rows = self._rows[node]
            if isinstance(rows, RowMap) and not self._emitter.can_read(rows):
                self._prober.probe(node)
            return
        named: dict[str, Callable[[Node], None]] = {
            "aten.linear": self._linear,
            "aten.addmm": self._addmm,
            "aten.mm": self._matmul,
            "aten.matmul": self._matmul,
            "aten.embedding": self._embedding,
            "octavo_derive.attention": self._attention,
            "octavo_derive.experts": self._experts.lower,
        }
        if name in named:
            named[name](node)
            if node not in self._rows:
                self._state.dead.add(node)
        else:
            self._prober.probe(node)

    def _move(self, node: Node) -> bool:
        """Lowers a node that only moves elements to a row map; returns whether that was
        possible.
        """
        inputs = [each for each in node.all_input_nodes if each in self._graph.dynamic]
        if not all(each in self._rows for each in inputs):
            return False
        numbers = {each: _numbers(self._rows[each]) for each in inputs}
        moved = call(node, {**self._graph.values, **numbers})
        if isinstance(moved, list | tuple):
            parts = [rows_of(part, self._state.num_tokens) for part in moved]
            if any(part is None for part in parts):
                return False
            self._rows[node] = parts
            return True
        rows = rows_of(moved, self._state.num_tokens)
        if rows is None:
            return False
        self._rows[node] = rows
        return True

    def _linear(self, node: Node) -> None:
        x, weight, *bias = node.args
        self._emit_linear(node, x, self._weights.matrix(weight), bias[0] if bias else None)

    def _addmm(self, node: Node) -> None:
        bias, x, weight = node.args[:3]
        self._emit_linear(node, x, self._weights.matrix(weight, swapped=True), bias)

    def _matmul(self, node: Node) -> None:
        x, weight = node.args[:2]
        self._emit_linear(node, x, self._weights.matrix(weight, swapped=True), None)

    def _emit_linear(self, node: Node, x: Any, matrix: Matrix | None, bias: Any) -> None:
        rows = self._rows.get(x)
        added = self._weights.vector(bias)
        if matrix is None or not isinstance(rows, RowMap) or (bias is not None and added is None):
            return
        value = self._emitter.value_of(rows)
        if rows.shape[-1] != value.width or value.width != matrix.inputs:
            raise self._state.rejected(node, "a matmul over a part of a row")
        out = self._emitter.product(GraphMatmul(value, matrix, added))
        self._state.anchor(node, out)

    def _embedding(self, node: Node) -> None:
        table, ids = self._weights.vector(node.args[0]), node.args[1]
        if table is None or not isinstance(ids, Node):
            return
        weight = self._weights.whole(table)
        name = weight.name.removesuffix(".weight")
        out = self._emitter.value(name, "tokens", weight.shape[1])
        if ids in self._graph.values:
            places = self._graph.values[ids].reshape(-1)
            offset = int(places[0])
            far = self._graph.far_values[ids].reshape(-1) - places
            if places.tolist() != [*range(offset, offset + self._state.num_tokens)] or not bool(
                ((far == FAR_POSITION) | (far == 0)).all()
            ):
                raise self._state.rejected(node, "an embedding of something other than positions")
            self._emitter.append(Embedding(out, weight, by_position=True, offset=offset))
        else:
            source = ids
            while source is not self._graph.ids and name_of(source) in SAME | MOVES:
                source = source.all_input_nodes[0]
            if source is not self._graph.ids:
                return
            self._emitter.append(Embedding(out, weight, self._ids))
        self._state.anchor(node, out)

    def _attention(self, node: Node) -> None:
        q, k, v, sinks, scale, mask_index, softcap = cast(Any, node.args)
        for each in (q, k, v):
            if not isinstance(self._rows.get(each), RowMap):
                raise self._state.rejected(each)
        num_heads, num_kv_heads = self._graph.shape(q)[1], self._graph.shape(k)[1]
        widths = self._graph.shape(k)[3], self._graph.shape(v)[3]
        mask = self._state.captured.masks[mask_index]
        group, layer = self._cache_layer((k, v), mask, num_kv_heads, widths)
        out = self._emitter.value("attention", "tokens", num_heads * widths[1])
        self._emitter.append(
            Attention(
                q=self._emitter.value_of(self._rows[q]),
                out=out,
                group=group,
                layer=layer,
                num_heads=num_heads,
                scale=scale,
                mask=cast(MaskKind, mask.kind),
                window=mask.size if mask.kind in ("window", "chunk") else None,
                softcap=softcap or None,
                sinks=None
                if sinks is None
                else self._weights.whole(self._weights.vector(sinks) or str(sinks)),
            )
        )
        self._state.anchor(node, out)

    def _cache_layer(
        self, kv: tuple[Node, Node], mask: AttentionMask, heads: int, widths: tuple[int, int]
    ) -> tuple[str, int]:
        """Returns the cache group and layer of K and V, written once."""
        if kv in self._layers:
            return self._layers[kv]
        size = mask.size if mask.kind in ("window", "chunk") else None
        kind: GroupKind = "full" if size is None else "window"
        key = (kind, heads, *widths, size)
        number = 1 + sum(other[0] == kind for other in self._groups)
        new = kind if number == 1 else f"{kind}{number}"
        name, layer = self._groups.get(key, (new, 0))
        self._groups[key] = (name, layer + 1)
        self._layers[kv] = (name, layer)
        keys, values = (self._emitter.value_of(self._rows[each]) for each in kv)
        self._emitter.kv_write(name, layer, (keys,), values)
        return name, layer


def _numbers(rows: Any) -> Any:
    return [each.numbers() for each in rows] if isinstance(rows, list) else rows.numbers()
