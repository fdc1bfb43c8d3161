"""Options that `octavo serve` chooses for its memory: a plan never exceeds the memory, and
the options that were given stay.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.api.errors import InsufficientMemory
from octavo.wiring.fit import EngineFit, EngineFitter
from tests.support.tiers import examples

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 128,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 128,
}


@pytest.fixture(scope="module", params=[LLAMA, GEMMA], ids=["llama", "gemma3"])
def model(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp(request.param["model_type"])
    (folder / "config.json").write_text(json.dumps(request.param))
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def fitter(model: str, **given: Any) -> EngineFitter:
    options = {"model": model, "backend": "native", "skip_tokenizer_init": True, "threads": 2}
    return EngineFitter({**options, **given})


def test_no_plan_exceeds_its_memory(model):
    draw, fits, chosen = random.Random(7), fitter(model), dict[int, EngineFit]()
    for _ in range(examples(60)):
        memory_bytes = int(0.25 * GIB * 2 ** draw.uniform(0, 8))
        try:
            chosen[memory_bytes] = fits.fit(memory_bytes)
        except InsufficientMemory as error:
            assert memory_bytes < 4 * GIB and "does not fit" in error.message
    for memory_bytes, fit in chosen.items():
        assert fit.predicted_bytes <= memory_bytes
        assert fit.plan.capacity.demand.max_model_len >= 64
        assert fit.plan.footprint.streamed_bytes == 0 or memory_bytes < 16 * GIB
    assert {bool(fit.plan.footprint.streamed_bytes) for fit in chosen.values()} == {False, True}


@pytest.mark.parametrize(
    ("memory_gib", "expected"),
    [
        (64, set()),
        (20, {"max_model_len", "kv_cache_memory_bytes", "max_num_seqs"}),
        (6, {"weights_memory_bytes", "weights_dir", "kv_cache_memory_bytes", "spec_method"}),
    ],
)
def test_the_cheapest_change_comes_first(llama, memory_gib, expected):
    fit = fitter(llama).fit(memory_gib * GIB)
    assert expected <= fit.options.keys() if expected else not fit.options
    described = fit.describe()
    assert all(f"{name} " in described for name in expected - {"kv_cache_memory_bytes"})
    assert {choice.option for choice in fit.choices()} >= {"threads", "spec_method"}


def test_options_that_were_given_stay(llama):
    given = {"max_model_len": 4096, "kv_cache_dtype": "bf16", "max_num_seqs": 2}
    fit = fitter(llama, **given).fit(6 * GIB)
    config = fit.plan.config
    assert not fit.options.keys() & given.keys()
    assert config.model.max_model_len == 4096 and config.cache.kv_cache_dtype == "bf16"
    with pytest.raises(InsufficientMemory, match="does not fit"):
        fitter(llama, kv_cache_memory_bytes="8GiB").fit(6 * GIB)


def test_measured_disks_decide_how_many_requests_run_beside_streamed_weights(llama):
    slow = EngineFitter(fitter(llama)._given, lambda plan: 8).fit(8 * GIB)
    assert slow.options["max_num_seqs"] == 8
    assert (
        slow.options["weights_memory_bytes"]
        < fitter(llama).fit(8 * GIB).options["weights_memory_bytes"]
    )


def test_rates_are_measured_once(llama, tmp_path, monkeypatch):
    from octavo.wiring import machine_rates

    plan = fitter(llama).fit(64 * GIB).plan
    path = tmp_path / "rates.json"
    first = machine_rates.get_ceilings(plan, path)
    monkeypatch.setattr(machine_rates, "_measure", lambda plan: pytest.fail("measured again"))
    assert machine_rates.get_ceilings(plan, path) == first and first.bandwidth > 0
    rate = machine_rates.get_disk_rate(Path(tmp_path), path)
    assert rate is None or machine_rates.get_disk_rate(Path(tmp_path), path) == rate
