"""Capacity and roofline: what fits, what is missing, and how fast it could be."""

import pytest

from octavo.api.errors import ConfigError
from octavo.checkpoint.open import open_checkpoint
from octavo.engine.protocol.kv_cache_spec import KvDemand, SlidingWindowSpec
from octavo.executor.base import Ceilings, Footprint
from octavo.models.registry import build_programs
from octavo.program.work import count_work
from octavo.worker.capacity import PROCESS_BYTES, Capacity
from octavo.worker.memory import GroupSize
from octavo.worker.memory_split import best_split, better_split
from octavo.worker.speed import Roofline
from tests.support.tiny_models import tiny_model

MIB = 1 << 20


def capacity(
    *windows, memory=1000, weights=100, step=20, wanted=None, max_model_len=160, max_num_seqs=8
):
    """Returns an engine whose sizes are in MiB, the processes not counted: a growing group with
    blocks of 1 MiB, and one with each of the windows.
    """
    groups = (GroupSize(MIB), *(GroupSize(MIB, SlidingWindowSpec(window)) for window in windows))
    sizes = {
        "memory_bytes": PROCESS_BYTES + memory * MIB,
        "weight_bytes": weights * MIB,
        "step_bytes": step * MIB,
    }
    return Capacity(
        **sizes,
        groups=groups,
        demand=KvDemand(max_model_len, max_num_seqs, 32),
        wanted_kv_bytes=wanted and wanted * MIB,
    )


def test_what_is_left_goes_to_requests():
    found = capacity()
    assert (found.left_bytes, found.kv_bytes) == (880 * MIB, 792 * MIB)
    assert [found.max_requests(n) for n in (1, 16, 17, 160)] == [792, 792, 396, 79]
    assert (
        found.kv_token_bytes == MIB / 16
        and found.shortfall_bytes == 0
        and found.max_context() == 160
    )
    found.check("it")


def test_windows_bound_what_a_request_keeps():
    found = capacity(32)
    assert [found.request_bytes(n) // MIB for n in (16, 48, 160)] == [2, 6, 13]


def test_a_shortfall_is_named():
    found = capacity(memory=125)
    assert found.shortfall_bytes == 5 * MIB and found.max_context() == 4 * 16
    with pytest.raises(ConfigError) as error:
        found.check("big")
    assert (
        error.value.message
        == "big does not fit: requires 322.0 MiB (weights 100.0 MiB, a step 20.0 MiB, KV cache"
        " 10.0 MiB for one request of 160 tokens); 317.0 MiB are free, 5.0 MiB are missing"
    )
    assert "octavo plan" in error.value.hint
    assert (
        capacity(memory=10).max_context() == 0 and capacity(memory=10).shortfall_bytes == 120 * MIB
    )
    with pytest.raises(
        ConfigError, match=r"KV cache 900.0 MiB\); 1.2 GiB are free, 20.0 MiB are missing"
    ):
        capacity(wanted=900).check("big")


def test_what_the_kv_budget_refuses_is_refused_before_loading():
    """The KV cache takes half of what is free by default."""
    with pytest.raises(ConfigError, match="not enough memory: 50% of the free memory"):
        capacity(memory=135).check("it")
    capacity(memory=140).check("it")


def test_work_is_two_multiplications_a_parameter_and_token():
    config = open_checkpoint(tiny_model("llama").path).config
    program = build_programs(config)["decoder"]
    work = count_work(program)
    assert work.per_sample == config["vocab_size"] * config["hidden_size"]
    assert (
        work.per_token == sum(w.shape[0] * w.shape[1] for w in work.read_by_all) - work.per_sample
    )
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    assert work.per_pair == {None: layers * heads * 2 * config["hidden_size"] // heads}
    assert (
        work.pairs(0, 5) == work.per_pair[None] * 15 and work.pairs(3, 5) == work.per_pair[None] * 9
    )


def test_experts_and_windows_count_as_far_as_they_are_used():
    work = count_work(build_programs(open_checkpoint(tiny_model("gpt_oss").path).config)["decoder"])
    assert {share for _, share in work.read_by_some} == {2 / 5}
    window, whole = work.per_pair[24], work.per_pair[None]
    assert work.pairs(0, 30) == window * (24 * 25 // 2 + 6 * 24) + whole * 30 * 31 // 2
    assert work.pairs(100, 101) == window * 24 + whole * 101


def test_the_roofline_is_the_larger_of_reading_and_multiplying():
    program = build_programs(open_checkpoint(tiny_model("llama").path).config)["decoder"]
    work, sizes = count_work(program), dict.fromkeys(program.weights, 1000)
    read = 1000 * len(work.read_by_all)

    def roofline(bandwidth, operations):
        return Roofline(
            work, Footprint(sizes, 0, (), "u8"), capacity(), Ceilings(bandwidth, operations)
        )

    slow_memory, slow_cores = roofline(1e6, 1e30), roofline(1e30, 1e9)
    assert slow_memory.decode_tokens_per_s(1, 16) == pytest.approx(1e6 / (read + MIB))
    assert slow_memory.decode_tokens_per_s(4, 32) == pytest.approx(4 * 1e6 / (read + 8 * MIB))
    assert slow_memory.prefill_tokens_per_s(40) == pytest.approx(40 * 1e6 / (2 * read + 5 * MIB))
    products = work.per_token + work.per_sample + work.pairs(16, 17)
    assert slow_cores.decode_tokens_per_s(7, 16) == pytest.approx(1e9 / (2 * products))
    assert slow_cores.prefill_tokens_per_s(40) == pytest.approx(
        40 * 1e9 / (2 * (40 * work.per_token + work.per_sample + work.pairs(0, 40)))
    )


def test_decode_of_one_request_takes_the_rates_of_products():
    program = build_programs(open_checkpoint(tiny_model("llama").path).config)["decoder"]
    work, sizes = count_work(program), dict.fromkeys(program.weights, 1000)
    first, *others = work.read_by_all
    products = {first: "slow", others[0]: "unknown"}
    footprint = Footprint(sizes, 0, (), "u8", row_products=products, num_stages=3)
    limits = Ceilings(1e6, 1e30, row_rates={"slow": 1e5}, kv_rate=5e5, stage_seconds=0.01)
    roofline = Roofline(work, footprint, capacity(), limits)
    seconds = 1000 / 1e5 + 1000 * len(others) / 1e6 + 3 * 0.01 + MIB / 5e5
    assert roofline.decode_tokens_per_s(1, 16) == pytest.approx(1 / seconds)
    together = 1000 * len(work.read_by_all) / 1e6 + 4 * MIB / 5e5
    assert roofline.decode_tokens_per_s(4, 16) == pytest.approx(4 / together)


def streamed(disk=10e6, operations=1e30, *, weights=40, left=100, kv=20):
    """Returns an engine of 200 MiB of weights, of which `weights` are in memory, and of K and V as
    much: requests of 16 tokens have 1 MiB each.
    """
    program = build_programs(open_checkpoint(tiny_model("llama").path).config)["decoder"]
    footprint = Footprint(
        dict.fromkeys(program.weights, 0),
        0,
        (),
        "u8",
        memory_bytes=weights * MIB,
        streamed_bytes=(200 - weights) * MIB,
        least_memory_bytes=12 * MIB,
    )
    sizes = capacity(memory=weights + left, weights=weights, step=0, wanted=kv, max_num_seqs=64)
    limits = Ceilings(1e30, operations, disk)
    return Roofline(count_work(program), footprint, sizes, limits)


def test_memory_goes_to_requests_before_weights_are_pinned():
    """A request more takes 1 MiB of pinned weights, which each step reads then."""
    found = best_split(streamed(), 16)
    assert found is not None
    assert (found.weights_bytes, found.kv_bytes) == (12 * MIB, 48 * MIB)
    assert (found.requests, found.streamed_bytes) == (48, 188 * MIB)
    assert found.tokens_per_s == pytest.approx(48 * 10e6 / (188 * MIB))
    assert better_split(streamed(), 16) == found
    assert better_split(streamed(weights=13, kv=47), 16) is None, "the given one is as good"


def test_more_requests_than_the_processor_computes_are_no_gain():
    given = streamed(disk=1e12, operations=1e6)
    found = best_split(given, 16)
    assert found is not None and found.requests == 1
    assert found.tokens_per_s == pytest.approx(given.decode_tokens_per_s(1, 16))


def test_a_split_has_room_for_the_longest_request():
    found = best_split(streamed(weights=40, kv=10), 16)
    assert found is not None and found.requests == 38
    assert best_split(streamed(weights=13, kv=8), 16) is None
