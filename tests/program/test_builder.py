"""The builder's names and weights, and the checks of a finished Program."""

from dataclasses import replace

import pytest

from octavo.program.builder import Builder
from octavo.program.ops import Add, Linear
from octavo.program.program import CacheGroup, Program, Value, Weight


def small():
    b = Builder("decoder", (CacheGroup("full", "full", 1, 2, 4, 6),), vocab_size=9)
    x = b.embedding(b.token_ids(), "embed", 9, 8)
    q, k, v = b.linear(x, "q", 16), b.linear(x, "k", 8), b.linear(x, "v", 12, bias=True)
    b.kv_write("full", 0, (k,), v)
    x = b.add(x, b.linear(b.attention(q, "full", 0, num_heads=4, scale=0.5), "o", 8))
    return b.finish(logits=b.linear(b.gather_rows(x), "embed", 9))


def test_values_are_named_after_their_modules():
    program = small()
    assert [value.name for op in program.ops for value in op.outputs] == [
        "embed",
        "q",
        "k",
        "v",
        "attention",
        "o",
        "sum",
        "sampled",
        "embed#2",
    ]
    assert program.inputs == {"token_ids": Value("token_ids", "tokens", 1, "int")}
    assert program.outputs["logits"] == Value("embed#2", "samples", 9)


def test_widths_follow_from_groups_and_inputs():
    values = {value.name: value for op in small().ops for value in op.outputs}
    assert values["attention"].width == 4 * 6
    assert values["sampled"].axis == "samples"


def test_weights_are_listed_once():
    names = [weight.name for weight in small().weights]
    assert names == ["embed.weight", "q.weight", "k.weight", "v.weight", "v.bias", "o.weight"]


def test_nothing_to_do_adds_no_op():
    b = Builder("test")
    x = b.hidden(3)
    assert b.scale(x, 1.0) is x and b.softcap(x, None) is x
    assert b.finish(out=x).ops == ()


def test_rows_of_a_checkpoint_tensor():
    assert Weight("w", (4, 9)).row_indices is None
    assert Weight("w", (3, 9), source_rows=9, row_start=3).row_indices == (3, 4, 5)
    assert Weight("w", (2, 3, 9), source_rows=6, row_start=1, row_step=2).row_indices == (1, 3, 5)
    assert Weight("w", (4, 9), source_rows=10, row_start=3, row_step=5, row_run=2).row_indices == (
        3,
        4,
        8,
        9,
    )
    assert Weight("w", (2, 3), source_rows=6, row_step=2, rows_last=True).row_indices == (0, 2, 4)


def test_check_finds_broken_programs():
    program = small()
    with pytest.raises(ValueError, match="Linear reads embed, which no earlier op makes"):
        replace(program, ops=program.ops[1:]).check()
    with pytest.raises(ValueError, match="Embedding makes embed a second time"):
        replace(program, ops=(program.ops[0], *program.ops)).check()
    with pytest.raises(ValueError, match="KvWrite uses the cache group full, known are"):
        replace(program, groups=()).check()
    with pytest.raises(ValueError, match="the output embed#2 is never made"):
        replace(program, ops=program.ops[:-1]).check()
    patches = {"token_ids": replace(program.inputs["token_ids"], axis="patches")}
    with pytest.raises(ValueError, match="makes token_ids on the axis patches, known are tokens"):
        replace(program, inputs=patches).check()


def test_ops_know_what_they_read_and_make():
    a, b, out = (Value(name, "tokens", 2) for name in "abo")
    assert Add(a, b, out).inputs == (a, b) and Add(a, b, out).outputs == (out,)
    linear = Linear(a, (b, out), (Weight("w", (4, 2)),), (None,), residual=b)
    assert (
        linear.inputs == (a, b)
        and linear.outputs == (b, out)
        and [w.name for w in linear.weights] == ["w"]
    )
    assert Program("p", {"hidden": a}, {"x": a}, ()).weights == ()
