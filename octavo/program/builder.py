"""Builds a Program op by op, so that a model family reads like its formula.

Owns the names of Values (after the module that makes them) and the link from a module's name to its
checkpoint tensors (`<module>.weight`, `<module>.bias`). Knows nothing of any family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.ops import (
    Act,
    Activation,
    ActMul,
    Add,
    AlibiBias,
    Attention,
    Clip,
    Combine,
    Embedding,
    GatherRows,
    GroupedLinear,
    GroupRank,
    KeepLargest,
    KvWrite,
    LayerNorm,
    Linear,
    MaskKind,
    MatchMagnitude,
    Mix,
    MlaAttention,
    Mul,
    NearBias,
    PlaceBuckets,
    PlaceScores,
    PoolRows,
    PreNorm,
    RmsNorm,
    Rope,
    RopeTable,
    Route,
    Scale,
    ScatterRows,
    Score,
    SoftCap,
    T5Bias,
)
from octavo.program.program import Axis, CacheGroup, Op, Program, Span, Value, Weight


class Builder:
    """Appends an op with each method call and returns the Value it makes. Widths are in columns,
    names are those of modules.
    """

    def __init__(self, name: str, groups: tuple[CacheGroup, ...] = (), vocab_size: int = 0) -> None:
        self._name = name
        self._groups = groups
        self._vocab_size = vocab_size
        self._inputs: dict[str, Value] = {}
        self._ops: list[Op] = []
        self._used: Counter[str] = Counter()

    def finish(self, **outputs: Value) -> Program:
        """Returns the Program, checked."""
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
        """Adds the input "token_ids"."""
        value = Value(self._fresh("token_ids"), "tokens", 1, "int")
        self._inputs["token_ids"] = value
        return value

    def hidden(self, width: int) -> Value:
        """Adds the input "hidden"."""
        value = self._value("hidden", "tokens", width)
        self._inputs["hidden"] = value
        return value

    # -- rows in, rows out -------------------------------------------------------------------------

    def table_part(self, ids: Value, table: Weight, columns: Span, *, scale: float) -> Value:
        """Reads some columns of a table's rows; ids behind the table read its first row."""
        part = table.part(inputs=columns)
        out = self._value(table.name.removesuffix(".weight"), ids.axis, part.shape[1])
        self._ops.append(Embedding(out, part, ids, scale, others_first=True))
        return out

    def match_magnitude(self, x: Value, like: Value, *, least: float) -> Value:
        out = self._like("matched", x)
        self._ops.append(MatchMagnitude(x, like, out, least))
        return out

    def keep_largest(self, x: Value, deviations: float) -> Value:
        out = self._like("largest", x)
        self._ops.append(KeepLargest(x, out, deviations))
        return out

    def mix(
        self,
        xs: Sequence[Value],
        bases: Sequence[Value],
        coefs: Value,
        *,
        offset: float = 0.0,
    ) -> tuple[Value, ...]:
        """Adds to each base its weighted sum of `xs`."""
        outs = tuple(self._like("mixed", base) for base in bases)
        self._ops.append(Mix(tuple(xs), tuple(bases), coefs, outs, offset))
        return outs

    def embedding(
        self, ids: Value, name: str, num_rows: int, width: int, *, scale: float = 1.0
    ) -> Value:
        out = self._value(name, ids.axis, width)
        self._ops.append(Embedding(out, Weight(f"{name}.weight", (num_rows, width)), ids, scale))
        return out

    def position_embedding(
        self, name: str, num_rows: int, width: int, *, offset: int = 0, axis: int = 0
    ) -> Value:
        table = Weight(f"{name}.weight", (num_rows, width))
        return self.position_embedding_of(table, offset=offset, axis=axis)

    def position_embedding_of(self, table: Weight, *, offset: int = 0, axis: int = 0) -> Value:
        out = self._value(table.name.removesuffix(".weight"), "tokens", table.shape[1])
        self._ops.append(Embedding(out, table, by_position=True, offset=offset, axis=axis))
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
        """Norms rows or their groups; without `has_weight` the weight is 1, in no checkpoint, with
        `each_group` it has a number for each column of every group.
        """
        out = self._like(name, x)
        fill = None if has_weight else 1.0
        width = x.width if each_group else group_width or x.width
        weight = Weight(f"{name}.weight", (width,), fill=fill)
        self._ops.append(RmsNorm(x, out, weight, eps, weight_offset, group_width))
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
        """Norms rows or their groups, all with the same numbers; without `has_weight` the weight is
        1 and the checkpoint has no tensor.
        """
        out, width = self._like(name, x), group_width or x.width
        weight = Weight(f"{name}.weight", (width,), fill=None if has_weight else 1.0)
        added = Weight(f"{name}.bias", (width,)) if bias else None
        self._ops.append(
            LayerNorm(x, out, weight, added, eps, weight_offset, group_width=group_width)
        )
        return out

    def head_norm(
        self, x: Value, name: str, eps: float, *, head_dim: int, is_apart: bool = False
    ) -> Value:
        """Norms each head with weights of its own, one tensor `[H, D]` or, where `is_apart`, a
        module for each head.
        """
        out, kernel = self._like(name, x), (head_dim,)
        heads = range(x.width // head_dim)
        sources = tuple(f"{name}.norms.{i}.weight" for i in heads) if is_apart else ()
        weight = Weight(f"{name}.weight", (x.width,), sources, kernel=kernel, stored_as="heads")
        self._ops.append(LayerNorm(x, out, weight, None, eps, group_width=head_dim))
        return out

    def linear(self, x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        """Multiplies with `name.weight [width, in]`, and adds `name.bias` with `bias`."""
        return self.linear_of(
            x,
            Weight(f"{name}.weight", (width, x.width)),
            Weight(f"{name}.bias", (width,)) if bias else None,
            name=name,
        )

    def linear_of(
        self, x: Value, weight: Weight, bias: Weight | None = None, *, name: str
    ) -> Value:
        """Multiplies with a weight whose tensors are not kept as `[out, in]` under the module's own
        name.
        """
        out = self._value(name, x.axis, weight.shape[0])
        self._ops.append(Linear(x, (out,), (weight,), () if bias is None else (bias,)))
        return out

    def linear_of_all(self, x: Value, weights: Sequence[Weight], *, name: str) -> Value:
        """Multiplies with several weights, and lays the results side by side."""
        out = self._value(name, x.axis, sum(weight.shape[0] for weight in weights))
        self._ops.append(Linear(x, (out,), tuple(weights)))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._like("sum", a)
        self._ops.append(Add(a, b, out))
        return out

    def mul(self, a: Value, b: Value) -> Value:
        out = self._like("product", a)
        self._ops.append(Mul(a, b, out))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """Multiplies with the factor; returns x itself where that is 1."""
        if factor == 1.0:
            return x
        out = self._like("scaled", x)
        self._ops.append(Scale(x, out, factor))
        return out

    def softcap(self, x: Value, cap: float | None) -> Value:
        """Caps softly; returns x itself where there is no cap."""
        if cap is None:
            return x
        out = self._like("capped", x)
        self._ops.append(SoftCap(x, out, cap))
        return out

    def scale_columns(self, x: Value, name: str) -> Value:
        """Multiplies each column with its number in the tensor of that name."""
        factors = self._like(name, x)
        table = Weight(name, (1, x.width), (name,))
        self._ops.append(Embedding(factors, table, by_position=True, others_first=True))
        return self.mul(x, factors)

    def clip(self, x: Value, limit: float | None) -> Value:
        """Bounds magnitudes; returns x itself where there is no limit."""
        if limit is None:
            return x
        out = self._like("clipped", x)
        self._ops.append(Clip(x, out, limit))
        return out

    def act(self, x: Value, activation: Activation) -> Value:
        out = self._like(activation, x)
        self._ops.append(Act(x, out, activation))
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
        out = self._like("gated", up)
        self._ops.append(
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
        """Rotates as many columns of each head as the table has frequencies for, twice."""
        out = self._like("rotated", x)
        self._ops.append(
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
        self._ops.append(KvWrite(k_parts, v, group, layer))

    def short_conv(
        self,
        x: Value,
        name: str,
        group: str,
        layer: int,
        *,
        bias: bool = False,
        activation: Activation | None = None,
        widths: tuple[int, ...] = (),
        factors: tuple[float, ...] = (),
    ) -> tuple[Value, ...]:
        """Convolves the columns of x with those of the request's earlier rows, and cuts the result
        into `widths`, by default one, whose weights `factors` multiply; the number of taps is the
        window of the group, which keeps the rows.
        """
        taps = next(entry for entry in self._groups if entry.name == group).window
        assert taps is not None, "a group of kind conv has a window"
        self.kv_write(group, layer, (x,), None)
        outs = tuple(self._value("convolved", x.axis, width) for width in widths or (x.width,))
        weight = Weight(f"{name}.weight", (x.width, 1, taps))
        added = Weight(f"{name}.bias", (x.width,)) if bias else None
        self._ops.append(
            ShortConv(
                x=x,
                outs=outs,
                weight=weight,
                bias=added,
                group=group,
                layer=layer,
                activation=activation,
                factors=() if all(factor == 1 for factor in factors) else factors,
            )
        )
        return outs

    def earlier_rows(self, own: Value, taps: Weight, group: str, layer: int) -> Value:
        """Sums rows of a group that another Program fills, and the request's `own`, each times its
        tap.
        """
        out = self._like("earlier", own)
        self._ops.append(ShortConv(own, (out,), taps, None, group, layer))
        return out

    def selective_scan(
        self,
        rows: tuple[Value, Value, Value, Value],
        name: str,
        group: str,
        layer: int,
        *,
        state_size: int,
        by_state: bool = False,
        dt_bias: bool = False,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Value:
        """Runs the recurrence over `rows`, which are x, dt, b and c, with the parameters A_log, D
        and, with `dt_bias`, that of the module `name`.

        `by_state`: A_log has a number for each head and state number.
        """
        x, dt, b, c = rows
        out = self._like("scanned", x)
        heads = (dt.width,)
        self._ops.append(
            SelectiveScan(
                x=x,
                dt=dt,
                b=b,
                c=c,
                out=out,
                a_log=Weight(f"{name}.A_log", (*heads, state_size) if by_state else heads),
                skip=Weight(f"{name}.D", heads),
                group=group,
                layer=layer,
                state_size=state_size,
                dt_bias=Weight(f"{name}.dt_bias", heads) if dt_bias else None,
                low=limits[0],
                high=limits[1],
            )
        )
        return out

    def delta_scan(
        self,
        rows: tuple[Value, Value, Value, Value, Value],
        name: str,
        group: str,
        layer: int,
        *,
        state_size: int,
    ) -> Value:
        """Runs the recurrence of the gated delta rule over `rows`, which are x, dt, b, c and beta,
        with the parameters A_log and dt_bias of the module `name`.
        """
        x, dt, b, c, beta = rows
        out = self._like("scanned", x)
        self._ops.append(
            SelectiveScan(
                x=x,
                dt=dt,
                b=b,
                c=c,
                out=out,
                a_log=Weight(f"{name}.A_log", (dt.width,)),
                skip=None,
                group=group,
                layer=layer,
                state_size=state_size,
                dt_bias=Weight(f"{name}.dt_bias", (dt.width,)),
                beta=beta,
            )
        )
        return out

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
        bias: T5Bias | AlibiBias | NearBias | PlaceBuckets | None = None,
        by_places: tuple[Value, Value] | None = None,
        sees_ahead: bool = False,
    ) -> Value:
        """Attends to the keys of a layer; the window, where the mask has one, is the group's.
        `by_places` are products of queries and of keys with tables of places, for PlaceBuckets.
        """
        of_queries, of_keys = by_places or (None, None)
        kv = next(entry for entry in self._groups if entry.name == group)
        out = self._value("attention", q.axis, num_heads * kv.v_width)
        window = kv.window if mask == "window" else None
        self._ops.append(
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

    def place_scores(
        self, x: Value, table: Weight, module: str, *, num_heads: int, norm: PreNorm | None
    ) -> Value:
        """Multiplies each head's columns with a table of places that goes through a norm and a
        module.
        """
        out = self._value(f"{module}.places", x.axis, num_heads * table.shape[0])
        weight = Weight(f"{module}.weight", (x.width, table.shape[1]))
        bias = Weight(f"{module}.bias", (x.width,))
        self._ops.append(
            PlaceScores(x, out, table, weight, bias=bias, num_heads=num_heads, norm=norm)
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
        kv = next(entry for entry in self._groups if entry.name == group)
        nope, rope = q_nope.width // num_heads, q_rope.width // num_heads
        v_width = kv_b.shape[0] // num_heads - nope
        out = self._value("attention", q_nope.axis, num_heads * v_width)
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
        self._ops.append(op)
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
    ) -> tuple[Value, Value, Value]:
        """Returns rows, ids and weights of the chosen experts."""
        outs = (
            self._value("expert_rows", "expert_rows", x.width),
            Value(self._fresh("expert_ids"), x.axis, top_k, "int"),
            self._value("expert_weights", x.axis, top_k),
        )
        self._ops.append(
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
            )
        )
        return outs

    def grouped_linear(
        self, x: Value, ids: Value, weight: Weight, bias: Weight | None = None
    ) -> Value:
        out = self._value("grouped", "expert_rows", weight.shape[1])
        self._ops.append(GroupedLinear(x, ids, out, weight, bias))
        return out

    def combine(self, x: Value, weights: Value) -> Value:
        out = self._value("combined", weights.axis, x.width)
        self._ops.append(Combine(x, weights, out))
        return out

    # -- rows chosen -------------------------------------------------------------------------------

    def gather_rows(self, x: Value) -> Value:
        out = self._value("sampled", "samples", x.width)
        self._ops.append(GatherRows(x, out))
        return out

    def scatter_rows(self, base: Value) -> Value:
        """Puts the step's given rows in the place of others."""
        out = self._like("scattered", base)
        self._ops.append(ScatterRows(out, base))
        return out

    def given_rows(self, width: int) -> Value:
        """Reads the step's given rows, one for each of its own."""
        out = self._value("given", "tokens", width)
        self._ops.append(ScatterRows(out))
        return out

    def pool_rows(self, x: Value, mode: Literal["last", "cls", "mean"]) -> Value:
        """Makes one row of each request's rows."""
        out = self._value("pooled", "requests", x.width)
        self._ops.append(PoolRows(x, out, mode))
        return out

    # -- names -------------------------------------------------------------------------------------

    def _value(self, name: str, axis: Axis, width: int) -> Value:
        return Value(self._fresh(name), axis, width)

    def _like(self, name: str, x: Value) -> Value:
        return self._value(name, x.axis, x.width)

    def _fresh(self, name: str) -> str:
        """Returns the name, with a number from its second use on."""
        self._used[name] += 1
        count = self._used[name]
        return name if count == 1 else f"{name}#{count}"
