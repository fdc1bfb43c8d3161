"""One memory shared out among several engines."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.errors import ConfigError
from octavo.engine.protocol.kv_cache_spec import KvDemand
from octavo.wiring.budget import share_memory
from octavo.worker.capacity import Capacity
from octavo.worker.memory import SAFE_SHARE, GroupSize, plan_kv
from tests.support.tiers import examples

MIB = 1 << 20


def capacity(weights_mib=100, *, max_model_len=1024, wanted_kv_bytes=None, max_num_seqs=128):
    return Capacity(
        memory_bytes=0,
        weight_bytes=weights_mib * MIB,
        step_bytes=50 * MIB,
        groups=(GroupSize(64 << 10),),
        demand=KvDemand(max_model_len, max_num_seqs, 2048),
        wanted_kv_bytes=wanted_kv_bytes,
    )


capacities = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        capacity,
        st.integers(1, 20_000),
        max_model_len=st.sampled_from([128, 1024, 32_768]),
        wanted_kv_bytes=st.none() | st.integers(16 * MIB, 4096 * MIB),
        max_num_seqs=st.sampled_from([1, 128]),
    ),
    min_size=1,
)


@settings(max_examples=examples(200), deadline=None)
@given(capacities, st.integers(0, 200_000))
def test_shares_stay_within_the_memory_and_suffice(models, memory_mib):
    """All engines together take no more than there is; each may run its longest request, and has
    no more than it can ever use.
    """
    memory = memory_mib * MIB
    try:
        shares = share_memory(models, memory)
    except ConfigError as error:
        least = sum(each.least_kv_bytes for each in models.values() if each.wanted_kv_bytes is None)
        own = sum(each.wanted_kv_bytes or 0 for each in models.values())
        left = memory - sum(each.fixed_bytes for each in models.values()) - own
        assert left < 0 or int(left * SAFE_SHARE) < least
        assert all(name in error.message for name in models)
        return
    assert shares.keys() == models.keys()
    assert sum(shares.values()) + sum(each.fixed_bytes for each in models.values()) <= memory
    for name, each in models.items():
        if each.wanted_kv_bytes is not None:
            assert shares[name] == each.wanted_kv_bytes
            continue
        plan_kv(each.groups, each.demand, wanted_bytes=shares[name], available_bytes=None)
        most = plan_kv(
            each.groups, each.demand, wanted_bytes=None, available_bytes=1 << 50, share=1.0
        )
        assert each.least_kv_bytes <= shares[name] <= max(most.num_bytes, each.least_kv_bytes)


def test_the_larger_model_gets_the_larger_share():
    shares = share_memory({"small": capacity(100), "large": capacity(300)}, 2000 * MIB)
    least = capacity().least_kv_bytes
    assert (shares["large"] - least) == pytest.approx(3 * (shares["small"] - least), rel=0.01)


def test_what_one_has_no_use_for_goes_to_the_others():
    modest = replace(capacity(1000), demand=KvDemand(128, 1, 2048))
    shares = share_memory({"modest": modest, "other": capacity(100)}, 8000 * MIB)
    alone = share_memory({"other": capacity(100)}, 8000 * MIB - modest.fixed_bytes)
    assert shares["other"] == pytest.approx(alone["other"], rel=0.01)


def test_the_refusal_is_one_sentence_with_each_models_need():
    with pytest.raises(ConfigError) as caught:
        share_memory({"a": capacity(100), "b": capacity(200)}, 300 * MIB)
    assert caught.value.message.startswith(
        "a, b do not fit in memory together: requires a 346.0 MiB with weights 100.0 MiB,"
        " b 446.0 MiB with weights 200.0 MiB; 300.0 MiB are free"
    )
    with pytest.raises(ConfigError, match="a does not fit: requires"):
        share_memory({"a": capacity(100)}, 300 * MIB)
