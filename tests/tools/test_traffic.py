"""Traces and synthetic traffic: lengths and blocks scale alike, equal names mean equal tokens, and
a wrong line is named.
"""

import itertools
import json
import math
import statistics
from fractions import Fraction

import pytest

from octavo.api.errors import ConfigError
from octavo.tools.bench.traffic import (
    Lengths,
    make_mixed,
    make_prompt,
    make_synthetic,
    parse_lengths,
    parse_scale,
    read_trace,
    schedule_at_rate,
    shared_share,
    spread_arrivals,
)

ROWS = [
    {"timestamp": 5000, "input_length": 1100, "output_length": 64, "hash_ids": [1, 2, 3]},
    {"timestamp": 6000, "input_length": 900, "output_length": 1, "hash_ids": [1, 2]},
    {"timestamp": 6500, "input_length": 700, "output_length": 33, "hash_ids": [4, 2]},
    {"timestamp": 5500, "input_length": 300, "output_length": 10},
]


@pytest.fixture
def trace(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    return write


def test_lengths_and_blocks_scale_alike(trace):
    requests = read_trace(trace(*ROWS), scale=Fraction(1, 32))
    assert [(request.at_s, request.input_len, request.output_len) for request in requests] == [
        (0, 35, 2),
        (0.5, 10, 1),
        (1, 29, 1),
        (1.5, 22, 2),
    ]
    assert [request.block_tokens for request in requests if request.block_ids] == [16] * 3
    first, second, other = (make_prompt(request, 0) for request in requests if request.block_ids)
    assert [len(first), len(second), len(other)] == [35, 29, 22]
    assert first[:29] == second, "equal names are equal tokens, of a block that is cut off too"
    assert other[:16] != first[:16] and other[16:] == first[16:22]
    assert make_prompt(requests[0], 0) == first and make_prompt(requests[0], 1) != first
    whole = read_trace(trace(*ROWS))[0]
    assert (whole.input_len, whole.block_tokens, len(make_prompt(whole, 0))) == (1100, 512, 1100)


def test_requests_of_one_moment_are_set_apart(trace):
    """Evenly up to the next moment; those of the last one over as long as those before it."""
    rows = [ROWS[0] | {"timestamp": at} for at in (0, 0, 0, 3000, 4000, 4000)]
    requests = spread_arrivals(read_trace(trace(*rows)))
    assert [request.at_s for request in requests] == [0, 1, 2, 3, 4, 4.5]
    assert [request.at_s for request in spread_arrivals(read_trace(trace(*rows[:2])))] == [0, 0]


def test_the_share_that_a_prefix_cache_could_find(trace):
    requests = read_trace(trace(*ROWS))
    assert shared_share(requests) == 900 / 3000, (
        "a block counts only where all before it were there"
    )


def test_only_the_first_requests_are_read(trace):
    assert len(read_trace(trace(*ROWS, "not read"), num_requests=4)) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON: "),
        (
            "[1]",
            "line 2: got [1], expected an object with timestamp, input_length and output_length",
        ),
        (
            {"timestamp": 1, "output_length": 1},
            "line 2: input_length is missing, expected an integer of at least 1",
        ),
        (
            ROWS[3] | {"input_length": -3},
            "line 2: input_length: got -3, expected an integer of at least 1",
        ),
        (
            ROWS[3] | {"output_length": 1.5},
            "line 2: output_length: got 1.5, expected an integer of at least 1",
        ),
        (
            ROWS[3] | {"output_length": True},
            "line 2: output_length: got True, expected an integer of at least 1",
        ),
        (
            ROWS[3] | {"timestamp": "now"},
            "line 2: timestamp: got 'now', expected a number of at least 0",
        ),
        (
            ROWS[3] | {"hash_ids": "abc"},
            "line 2: hash_ids: got 'abc', expected a list of integers",
        ),
        (
            ROWS[0] | {"hash_ids": [1]},
            "line 2: hash_ids: got 1, expected 3 blocks of 512 for input_length 1100",
        ),
    ],
)
def test_a_wrong_line_is_named(trace, line, message):
    with pytest.raises(ConfigError) as error:
        read_trace(trace(ROWS[0], line))
    assert message in error.value.message and "trace.jsonl" in error.value.message


def test_a_trace_without_requests_is_refused(trace, tmp_path):
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace(trace("", ""))
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)


def test_blocks_must_stay_whole(trace):
    with pytest.raises(ConfigError) as error:
        read_trace(trace(ROWS[0]), scale=Fraction(1, 30))
    assert (
        error.value.message == "scale: got 1/30, which scales blocks of 512 tokens to 17.0667,"
        " expected a multiple of 16"
    )
    assert error.value.hint == "use --scale 1/32"
    assert read_trace(trace(ROWS[3]), scale=Fraction(1, 30))[0].input_len == 10, (
        "without blocks any scale will do"
    )


@pytest.mark.parametrize("text", ["0", "-1", "1/0", "many", ""])
def test_scales(text):
    assert (parse_scale("1/32"), parse_scale("0.5"), parse_scale("2")) == (
        Fraction(1, 32),
        Fraction(1, 2),
        2,
    )
    with pytest.raises(ConfigError, match="scale: got"):
        parse_scale(text)


def test_poisson():
    requests = make_synthetic(num_requests=4000, input_len=7, output_len=3)
    timed = schedule_at_rate(requests, 20.0, seed=1)
    assert timed[-1].at_s == pytest.approx(200, rel=0.1) and timed == schedule_at_rate(
        requests, 20.0, seed=1
    ) != schedule_at_rate(requests, 20.0, seed=2)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(timed)]
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03), (
        "exponential"
    )
    assert {request.at_s for request in schedule_at_rate(requests, math.inf, seed=1)} == {0}
    assert (
        make_prompt(timed[0], 0) != make_prompt(timed[1], 0) and len(make_prompt(timed[0], 0)) == 7
    )


def test_bursts_keep_the_rate_and_vary_more():
    """The coefficient of variation of gamma gaps is one over the root of their shape."""
    requests = make_synthetic(num_requests=20_001, input_len=1, output_len=1)
    for burstiness in (0.25, 1.0, 4.0):
        times = [request.at_s for request in schedule_at_rate(requests, 5.0, 1, burstiness)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        mean = statistics.mean(gaps)
        assert mean == pytest.approx(0.2, rel=0.05)
        assert statistics.pstdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_drawn_lengths_stay_in_their_range_and_repeat():
    inputs = parse_lengths("input_len", "64-2048")
    assert (inputs, parse_lengths("output_len", "7")) == (Lengths(64, 2048), Lengths(7, 7))
    requests = make_mixed(2000, inputs, Lengths(7, 7), seed=1)
    assert {request.output_len for request in requests} == {7}
    lengths = [request.input_len for request in requests]
    assert 64 <= min(lengths) < 70 and 1900 < max(lengths) <= 2048
    assert statistics.median(lengths) == pytest.approx(math.sqrt(64 * 2048), rel=0.1), (
        "each doubling is as likely as any other"
    )
    assert requests == make_mixed(2000, inputs, Lengths(7, 7), seed=1)
    assert requests != make_mixed(2000, inputs, Lengths(7, 7), seed=2)


@pytest.mark.parametrize("text", ["0", "-5", "8-", "9-8", "1-2-3", "1.5", "many", ""])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(ConfigError, match="input_len: got"):
        parse_lengths("input_len", text)
