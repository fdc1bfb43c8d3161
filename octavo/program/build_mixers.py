"""Builder functions for the ops of `mixers.py`."""

from __future__ import annotations

from octavo.program.builder import Builder
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.ops import Activation
from octavo.program.program import Value, Weight


def short_conv(
    b: Builder,
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
    """Adds a causal convolution of x over the request's earlier rows; returns the result split into
    columns of `widths` (default: one Value).

    `factors` scale the weights of each part. The cache group stores the earlier rows; its window is
    the number of taps.
    """
    taps = b.group(group).window
    assert taps is not None, "a group of kind conv has a window"
    b.kv_write(group, layer, (x,), None)
    outs = tuple(b.value("convolved", x.axis, width) for width in widths or (x.width,))
    weight = Weight(f"{name}.weight", (x.width, 1, taps))
    added = Weight(f"{name}.bias", (x.width,)) if bias else None
    b.append(
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


def earlier_rows(b: Builder, own: Value, taps: Weight, group: str, layer: int) -> Value:
    """Sums the row `own` and the request's earlier rows, which another Program writes to the group,
    each multiplied by its tap.
    """
    out = b.like("earlier", own)
    b.append(ShortConv(own, (out,), taps, None, group, layer))
    return out


def selective_scan(
    b: Builder,
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
    """Adds a state-space recurrence over `rows` (x, dt, b, c) with the parameters A_log, D and
    optionally dt_bias of the module `name`.

    `by_state`: A_log has a value per head and state index.
    """
    x, dt, left, right = rows
    out = b.like("scanned", x)
    heads = (dt.width,)
    b.append(
        SelectiveScan(
            x=x,
            dt=dt,
            b=left,
            c=right,
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
    b: Builder,
    rows: tuple[Value, Value, Value, Value, Value],
    name: str,
    group: str,
    layer: int,
    *,
    state_size: int,
    a_log: Weight,
) -> Value:
    """Adds the recurrence of the gated delta rule over `rows` (x, dt, b, c, beta) with the
    parameter dt_bias of the module `name`.
    """
    x, dt, left, right, beta = rows
    out = b.like("scanned", x)
    b.append(
        SelectiveScan(
            x=x,
            dt=dt,
            b=left,
            c=right,
            out=out,
            a_log=a_log,
            skip=None,
            group=group,
            layer=layer,
            state_size=state_size,
            dt_bias=Weight(f"{name}.dt_bias", (dt.width,)),
            beta=beta,
        )
    )
    return out
