"""The KV budget and its messages."""

import pytest

from octavo.errors import ConfigError
from octavo.worker.memory import plan_kv

MIB = 1 << 20


def plan(**options):
    return plan_kv(
        **{"block_bytes": MIB, "max_model_len": 160, "max_num_seqs": 4, "wanted_bytes": None, "available_bytes": 1 << 40} | options
    )


def test_default_holds_every_request_whole():
    assert plan().num_blocks == 40


def test_default_takes_half_of_what_is_free():
    assert plan(available_bytes=40 * MIB).num_blocks == 20


def test_given_bytes_are_taken():
    budget = plan(wanted_bytes=100 * MIB + 5)
    assert (budget.num_blocks, budget.num_tokens) == (100, 1600)
    assert budget.describe() == "KV cache 100.0 MiB: 1,600 tokens, 10 requests of 160"


def test_too_little_given():
    with pytest.raises(ConfigError) as error:
        plan(wanted_bytes=5 * MIB)
    assert str(error.value) == (
        "kv_cache_memory_bytes: got 5.0 MiB, needed are 10.0 MiB for one request of 160 tokens\n"
        "hint: raise kv_cache_memory_bytes, or set max_model_len to at most 80"
    )


def test_too_little_free():
    with pytest.raises(ConfigError, match=r"too little memory: 50% of what is free: got 4.0 MiB, needed are 10.0 MiB"):
        plan(available_bytes=8 * MIB)
