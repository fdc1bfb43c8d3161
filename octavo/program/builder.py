"""Builds a Program op by op, so that the code of a model family reads like its formula.

Values are named after the module that computes them; checkpoint tensors are `<module>.weight` and
`<module>.bias`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from octavo.program.expert_ops import (
    Combine,
    GroupedLinear,
    GroupRank,
    Route,
    Score,
    check_choice,
)
from octavo.program.ops import (
    Act,
    Activation,
    ActMul,
    Add,
    AlibiBias,
    Attention,
    Clip,
    Embedding,
    GatherRows,
    KvWrite,
    LayerNorm,
    Linear,
    MaskKind,
    MlaAttention,
    Mul,
    NearBias,
    PoolRows,
    PositionBuckets,
    RmsNorm,
    Rope,
    RopeTable,
    Scale,
    ScatterRows,
    SoftCap,
    T5Bias,
)
from octavo.program.program import Axis, CacheGroup, Op, Program, Value, Weight


class Builder:
    """Each method appends an op and returns the Value that it computes.

    Widths are in columns; names are module names.
    """

    def __init__(self, name: str, groups: tuple[CacheGroup, ...] = (), vocab_size: int = 0) -> None:
        self._name = name
        self._groups = groups
        self._vocab_size = vocab_size
        self._inputs: dict[str, Value] = {}
        self._ops: list[Op] = []
        self._used: Counter[str] = Counter()

    def finish(self, **outputs: Value) -> Program:
        """Validates and returns the Program."""
        program = Program(
            self._name,
            dict(self._inputs),
            outputs,
            tuple(self._ops),
            self._groups,
            self._vocab_size,
        )
        program.check()
        return program

    def token_ids(self) -> Value:
        value = Value(self._fresh("token_ids"), "tokens", 1, "int")
        self._inputs["token_ids"] = value
        return value

    def hidden(self, width: int) -> Value:
        value = self.value("hidden", "tokens", width)
        self._inputs["hidden"] = value
        return value

    def append(self, op: Op) -> None:
        """Appends an op without a builder method, such as one of a single family or of
        `mixers.py`.
        """
        self._ops.append(op)

    def group(self, name: str) -> CacheGroup:
        return next(group for group in self._groups if group.name == name)

    # -- rows in, rows out -------------------------------------------------------------------------

    def embedding(
        self, ids: Value, name: str, num_rows: int, width: int, *, scale: float = 1.0
    ) -> Value:
        out = self.value(name, ids.axis, width)
        self.append(Embedding(out, Weight(f"{name}.weight", (num_rows, width)), ids, scale))
        return out

    def position_embedding(
        self, name: str, num_rows: int, width: int, *, offset: int = 0, axis: int = 0
    ) -> Value:
        table = Weight(f"{name}.weight", (num_rows, width))
        return self.embed_positions(table, offset=offset, axis=axis)

    def embed_positions(self, table: Weight, *, offset: int = 0, axis: int = 0) -> Value:
        out = self.value(table.name.removesuffix(".weight"), "tokens", table.shape[1])
        self.append(Embedding(out, table, by_position=True, offset=offset, axis=axis))
        return out

    def rms_norm(
        self,
        x: Value,
        name: str,
        eps: float,
        *,
        has_weight: bool = True,
        weight_offset: float = 0.0,
        group_width: int = 0,
        each_group: bool = False,
    ) -> Value:
        """Normalizes rows or groups of columns.

        Without `has_weight` the weight is 1 and not in the checkpoint; with `each_group` every
        group has its own weights.
        """
        out = self.like(name, x)
        fill = None if has_weight else 1.0
        width = x.width if each_group else group_width or x.width
        weight = Weight(f"{name}.weight", (width,), fill=fill)
        self.append(RmsNorm(x, out, weight, eps, weight_offset, group_width))
        return out

    def layer_norm(
        self,
        x: Value,
        name: str,
        eps: float,
        *,
        bias: bool = True,
        has_weight: bool = True,
        weight_offset: float = 0.0,
        group_width: int = 0,
    ) -> Value:
        """Normalizes rows or groups of columns with shared weights; without `has_weight` the weight
        is 1 and not in the checkpoint.
        """
        out, width = self.like(name, x), group_width or x.width
        weight = Weight(f"{name}.weight", (width,), fill=None if has_weight else 1.0)
        added = Weight(f"{name}.bias", (width,)) if bias else None
        self.append(LayerNorm(x, out, weight, added, eps, weight_offset, group_width=group_width))
        return out

    def head_norm(
        self, x: Value, name: str, eps: float, *, head_dim: int, is_apart: bool = False
    ) -> Value:
        """Normalizes each head with its own weights: one tensor `[H, D]`, or one module per head
        with `is_apart`.
        """
        out, kernel = self.like(name, x), (head_dim,)
        heads = range(x.width // head_dim)
        sources = tuple(f"{name}.norms.{i}.weight" for i in heads) if is_apart else ()
        weight = Weight(f"{name}.weight", (x.width,), sources, kernel=kernel, stored_as="heads")
        self.append(LayerNorm(x, out, weight, None, eps, group_width=head_dim))
        return out

    def linear(self, x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        """Computes x @ `name.weight [width, in]`^T, plus `name.bias` if `bias`."""
        return self.linear_from(
            x,
            Weight(f"{name}.weight", (width, x.width)),
            Weight(f"{name}.bias", (width,)) if bias else None,
            name=name,
        )

    def linear_from(
        self, x: Value, weight: Weight, bias: Weight | None = None, *, name: str
    ) -> Value:
        """Computes a matmul with an explicit weight, e.g. one that is stored under a different name
        or layout.
        """
        out = self.value(name, x.axis, weight.shape[0])
        self.append(Linear(x, (out,), (weight,), () if bias is None else (bias,)))
        return out

    def linear_concat(self, x: Value, weights: Sequence[Weight], *, name: str) -> Value:
        """Computes matmuls with several weights and concatenates the results."""
        out = self.value(name, x.axis, sum(weight.shape[0] for weight in weights))
        self.append(Linear(x, (out,), tuple(weights)))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self.like("sum", a)
        self.append(Add(a, b, out))
        return out

    def mul(self, a: Value, b: Value) -> Value:
        out = self.like("product", a)
        self.append(Mul(a, b, out))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """Multiplies by the factor; returns x itself if it is 1."""
        if factor == 1.0:
            return x
        out = self.like("scaled", x)
        self.append(Scale(x, out, factor))
        return out

    def softcap(self, x: Value, cap: float | None) -> Value:
        """Applies a soft cap; returns x itself without one."""
        if cap is None:
            return x
        out = self.like("capped", x)
        self.append(SoftCap(x, out, cap))
        return out

    def clip(self, x: Value, limit: float | None) -> Value:
        """Clips magnitudes; returns x itself without a limit."""
        if limit is None:
            return x
        out = self.like("clipped", x)
        self.append(Clip(x, out, limit))
        return out

    def act(self, x: Value, activation: Activation) -> Value:
        out = self.like(activation, x)
        self.append(Act(x, out, activation))
        return out

    def act_mul(
        self,
        gate: Value,
        up: Value,
        activation: Activation,
        *,
        clamp: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
    ) -> Value:
        out = self.like("gated", up)
        self.append(
            ActMul(
                gate=gate,
                up=up,
                out=out,
                activation=activation,
                clamp=clamp,
                alpha=alpha,
                up_offset=up_offset,
            )
        )
        return out

    # -- attention and its cache -------------------------------------------------------------------

    def rope(
        self,
        x: Value,
        num_heads: int,
        table: RopeTable,
        *,
        rotary_start: int = 0,
        style: Literal["half", "interleaved"] = "half",
    ) -> Value:
        """Rotates two columns of each head per frequency in the table."""
        out = self.like("rotated", x)
        self.append(
            Rope(
                x=x,
                out=out,
                num_heads=num_heads,
                head_width=x.width // num_heads,
                rotary_dim=2 * len(table.inv_freq),
                rotary_start=rotary_start,
                table=table,
                style=style,
            )
        )
        return out

    def kv_write(self, group: str, layer: int, k_parts: tuple[Value, ...], v: Value | None) -> None:
        self.append(KvWrite(k_parts, v, group, layer))

    def attention(
        self,
        q: Value,
        group: str,
        layer: int,
        *,
        num_heads: int,
        scale: float,
        mask: MaskKind = "causal",
        softcap: float | None = None,
        sinks: Weight | None = None,
        bias: T5Bias | AlibiBias | NearBias | PositionBuckets | None = None,
        position_scores: tuple[Value, Value] | None = None,
        sees_ahead: bool = False,
    ) -> Value:
        """Attends to the keys of a layer; a window mask uses the group's window.

        `position_scores` are products of queries and of keys with relative position tables, for
        PositionBuckets.
        """
        of_queries, of_keys = position_scores or (None, None)
        kv = self.group(group)
        out = self.value("attention", q.axis, num_heads * kv.v_width)
        window = kv.window if mask in ("window", "chunk") else None
        self.append(
            Attention(
                q=q,
                out=out,
                group=group,
                layer=layer,
                num_heads=num_heads,
                scale=scale,
                mask=mask,
                window=window,
                softcap=softcap,
                sinks=sinks,
                bias=bias,
                of_queries=of_queries,
                of_keys=of_keys,
                sees_ahead=sees_ahead,
            )
        )
        return out

    def mla_attention(
        self,
        q_nope: Value,
        q_rope: Value,
        kv_b: Weight,
        *,
        group: str,
        layer: int,
        num_heads: int,
        scale: float,
        form: Literal["absorbed", "expanded"] = "absorbed",
    ) -> Value:
        kv = self.group(group)
        nope, rope = q_nope.width // num_heads, q_rope.width // num_heads
        v_width = kv_b.shape[0] // num_heads - nope
        out = self.value("attention", q_nope.axis, num_heads * v_width)
        latent = kv.k_width - rope
        op = MlaAttention(
            q_nope=q_nope,
            q_rope=q_rope,
            out=out,
            kv_b=kv_b,
            group=group,
            layer=layer,
            num_heads=num_heads,
            nope_width=nope,
            rope_width=rope,
            latent_width=latent,
            v_width=v_width,
            scale=scale,
            form=form,
        )
        self.append(op)
        return out

    # -- experts -----------------------------------------------------------------------------------

    def route(
        self,
        x: Value,
        logits: Value,
        top_k: int,
        *,
        score: Score = "softmax",
        bias: Weight | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        group_rank: GroupRank = "two_best",
        normalize: bool = False,
        scale: float = 1.0,
        scales_rows: bool = False,
        jitter: float = 0.0,
        factors: Weight | None = None,
    ) -> tuple[Value, Value, Value]:
        """Returns rows, ids and weights of the chosen experts.

        Raises UnsupportedModel if a row cannot choose `top_k`.
        """
        check_choice(logits.width, top_k, num_groups=num_groups, top_groups=top_groups)
        outs = (
            self.value("expert_rows", "expert_rows", x.width),
            Value(self._fresh("expert_ids"), x.axis, top_k, "int"),
            self.value("expert_weights", x.axis, top_k),
        )
        self.append(
            Route(
                x=x,
                logits=logits,
                outs=outs,
                num_experts=logits.width,
                top_k=top_k,
                score=score,
                bias=bias,
                num_groups=num_groups,
                top_groups=top_groups,
                group_rank=group_rank,
                normalize=normalize,
                scale=scale,
                scales_rows=scales_rows,
                jitter=jitter,
                factors=factors,
            )
        )
        return outs

    def grouped_linear(
        self, x: Value, ids: Value, weight: Weight, bias: Weight | None = None
    ) -> Value:
        out = self.value("grouped", "expert_rows", weight.shape[1])
        self.append(GroupedLinear(x, ids, out, weight, bias))
        return out

    def combine(self, x: Value, weights: Value) -> Value:
        out = self.value("combined", weights.axis, x.width)
        self.append(Combine(x, weights, out))
        return out

    # -- rows chosen -------------------------------------------------------------------------------

    def gather_rows(self, x: Value) -> Value:
        out = self.value("sampled", "samples", x.width)
        self.append(GatherRows(x, out))
        return out

    def scatter_rows(self, base: Value) -> Value:
        """Replaces rows by the step's external rows, such as image embeddings."""
        out = self.like("scattered", base)
        self.append(ScatterRows(out, base))
        return out

    def input_rows(self, width: int) -> Value:
        """Reads the first columns of the step's external rows, one row per token; zeros for other
        tokens.
        """
        out = self.value("input_rows", "tokens", width)
        self.append(ScatterRows(out))
        return out

    def pool_rows(self, x: Value, mode: Literal["last", "cls", "mean"]) -> Value:
        """Reduces each request's rows to one."""
        out = self.value("pooled", "requests", x.width)
        self.append(PoolRows(x, out, mode))
        return out

    # -- names -------------------------------------------------------------------------------------

    def value(self, name: str, axis: Axis, width: int) -> Value:
        """Returns a new Value with a unique name."""
        return Value(self._fresh(name), axis, width)

    def like(self, name: str, x: Value) -> Value:
        """Returns a new Value with the axis and width of x."""
        return self.value(name, x.axis, x.width)

    def _fresh(self, name: str) -> str:
        """Makes a name unique by appending a number."""
        self._used[name] += 1
        count = self._used[name]
        return name if count == 1 else f"{name}#{count}"
