"""`octavo bench` does exactly the given work, and its figures add up."""

import json

import pytest

from octavo.tools.bench.percentiles import percentiles

SIZES = ("--num-prompts=3", "--input-len=10", "--output-len=7")


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_counts_and_rates(octavo, tiny, kind):
    ended = octavo("bench", kind, *tiny, *SIZES, "--rounds=3", "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert (result["prompt_tokens"], result["output_tokens"]) == (30, 21)
    assert len(result["each_round"]) == 3
    assert result["num_steps"] >= 7 * (3 if kind == "latency" else 1)
    assert sorted(one["elapsed_s"] for one in result["each_round"])[1] == result["elapsed_s"]
    for one in result["each_round"]:
        assert one["total_tokens_per_s"] == pytest.approx(51 / one["elapsed_s"])
        assert (
            one["inter_token_ms"]["p50"]
            <= one["inter_token_ms"]["p90"]
            <= one["inter_token_ms"]["p99"]
        )
        assert 0 < one["time_to_first_token_ms"]["p50"] <= one["request_latency_ms"]["p50"]
    assert ("single_steps" in result) == (kind == "latency")
    if kind == "latency":
        assert (
            result["single_steps"]["output_tokens"] == 21
            and result["single_steps"]["num_steps"] == result["num_steps"]
        )
    backend = result["engine"]["backend"]
    assert (backend["backend"], backend["threads"]) == ("native", 1)


@pytest.mark.parametrize("layout", ["paged", "virtual"])
def test_kv_utilisation(octavo, tiny, layout):
    """One request of 20 + 12 tokens has 31 computed tokens in 2 blocks at its end; whole contexts
    would have room for 256.
    """
    sizes = ("--num-prompts=2", "--input-len=20", "--output-len=12", "--no-enable-prefix-caching")
    kv = json.loads(
        octavo("bench", "latency", *tiny, *sizes, f"--kv-layout={layout}", "--json").out
    )["kv"]
    used, blocks = sum(range(20, 32)) / 12, 2
    assert kv["layout"] == layout
    assert kv["utilisation_of_whole_contexts"] == pytest.approx(used / 256)
    assert kv["used_bytes"] / kv["whole_contexts_bytes"] == pytest.approx(used / 256)
    if layout == "paged":
        assert kv["utilisation"] == pytest.approx(used / (blocks * 16))
    else:
        assert 0 < kv["utilisation"] <= used / (blocks * 16), "whole pages"


def test_what_the_textbook_compares(octavo, tiny):
    """Each scheme of docs/concepts/textbook.md is one option; steps depend only on the seed."""

    def steps(*options: str) -> int:
        sizes = (
            "--num-prompts=6",
            "--input-len=10",
            "--output-len=20",
            "--range-ratio=0.9",
            "--max-num-seqs=2",
            "--json",
        )
        ended = octavo("bench", "throughput", *tiny, *sizes, *options)
        assert ended.code == 0, ended.err
        return json.loads(ended.out)["num_steps"]

    continuous, static = steps("--batching=continuous"), steps("--batching=static")
    assert continuous < static < steps("--batching=none")
    assert steps("--batching=dynamic", "--batch-window-ms=1") == static
    assert (
        steps("--no-kv-cache")
        == steps("--kv-layout=virtual", "--no-enable-prefix-caching")
        == continuous
    )
    whole = ("--no-enable-chunked-prefill",)
    assert steps(*whole) == continuous < steps(*whole, "--scheduler-delay-factor=1000")


def test_lengths_drawn_from_a_range(octavo, tiny):
    sizes = ("--num-prompts=8", "--input-len=20", "--output-len=10", "--range-ratio=0.5", "--json")
    first, second = (json.loads(octavo("bench", "throughput", *tiny, *sizes).out) for _ in range(2))
    assert 8 * 10 <= first["prompt_tokens"] <= 8 * 30 and 8 * 5 <= first["output_tokens"] <= 8 * 15
    assert first["prompt_tokens"] == second["prompt_tokens"] != 160


def test_a_table_for_people(octavo, tiny):
    out = octavo("bench", "latency", *tiny, *SIZES).out
    assert "output tokens/s" in out and "inter token ms" in out and "KV utilisation" in out


def test_one_token_has_no_gaps(octavo, tiny):
    result = json.loads(
        octavo(
            "bench",
            "latency",
            *tiny,
            "--num-prompts=1",
            "--output-len=1",
            "--input-len=4",
            "--json",
        ).out
    )
    assert result["inter_token_ms"] == {}


def test_a_prefix_in_common(octavo, tiny):
    sizes = ("--num-prompts=4", "--input-len=10", "--output-len=6", "--shared-prefix-len=40")
    result = json.loads(octavo("bench", "throughput", *tiny, *sizes, "--json").out)
    assert result["prompt_tokens"] == 4 * 50
    assert (
        "4 prompts of 40 tokens in common and 10 tokens and 6 new ones each"
        in octavo("bench", "throughput", *tiny, *sizes).out
    )


def test_what_does_not_fit_the_context_is_refused(octavo, tiny):
    ended = octavo("bench", "throughput", *tiny, "--input-len=200", "--output-len=100")
    assert (ended.code, ended.message) == (
        2,
        [
            "octavo: input_len + output_len: got 300, expected at most the context, 256",
            "hint: use shorter lengths, or raise max_model_len",
        ],
    )


def test_percentiles_by_nearest_rank():
    assert percentiles(value / 1000 for value in range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles(iter([0.001])) == {"p50": 1, "p90": 1, "p99": 1}


def test_a_report_is_a_table_to_paste(octavo, tiny):
    ended = octavo("bench", "report", *tiny, "--rounds=1")
    assert ended.code == 0, ended.err
    head, rule, *rows = ended.out.splitlines()
    assert (head, rule) == ("| | |", "|---|---|")
    cells = dict(row.strip("| ").split(" | ") for row in rows)
    assert cells["threads"] == "1"
    assert cells["backend"].startswith("native, level ")
    assert cells["memory read"].endswith(" GB/s")
    assert cells["one stream of 128 + 128 tokens"].endswith(" output tokens/s")
    assert cells["32 streams of 128 + 128 tokens"].endswith(" output tokens/s")
    assert cells["prompt of 255 tokens"].endswith(" prompt tokens/s"), "the context has 256"
