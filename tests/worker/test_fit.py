"""Options that `octavo serve` chooses for its memory: a plan never exceeds the memory, and
the options that were given stay.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.api.errors import InsufficientMemory
from octavo.wiring.fitting.fit import EngineFit, EngineFitter
from tests.support.tiers import examples

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 8,
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


def options_of(model: str) -> dict[str, Any]:
    return {"model": model, "backend": "native", "skip_tokenizer_init": True, "threads": 2}


def fitter(model: str, **given: Any) -> EngineFitter:
    return EngineFitter({**options_of(model), **given})


def test_no_plan_exceeds_its_memory(model):
    draw, fits, chosen = random.Random(7), fitter(model), dict[int, EngineFit]()
    for _ in range(examples(10)):
        memory_bytes = int(0.25 * GIB * 2 ** draw.uniform(0, 8))
        try:
            chosen[memory_bytes] = fits.fit(memory_bytes)
        except InsufficientMemory as error:
            assert memory_bytes < 4 * GIB and "does not fit" in error.message
    for memory_bytes, fit in chosen.items():
        assert fit.predicted_bytes <= memory_bytes
        assert fit.plan.capacity.demand.max_model_len >= 64
        assert fit.plan.footprint.streamed_bytes == 0 or memory_bytes < 16 * GIB


@pytest.mark.parametrize(
    ("memory_gib", "expected"),
    [
        (64, set()),
        (6, {"max_model_len", "kv_cache_memory_bytes", "max_num_seqs"}),
        (2, {"weights_memory_bytes", "weights_dir", "kv_cache_memory_bytes", "spec_method"}),
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
    fit = fitter(llama, **given).fit(2 * GIB)
    config = fit.plan.config
    assert not fit.options.keys() & given.keys()
    assert config.model.max_model_len == 4096 and config.cache.kv_cache_dtype == "bf16"
    with pytest.raises(InsufficientMemory, match="does not fit"):
        fitter(llama, kv_cache_memory_bytes="8GiB").fit(6 * GIB)


def test_measured_disks_decide_how_many_requests_run_beside_streamed_weights(llama):
    memory_bytes = 5 * GIB // 2
    fast = fitter(llama).fit(memory_bytes).options
    slow = EngineFitter(options_of(llama), lambda plan: 8).fit(memory_bytes).options
    assert slow["max_num_seqs"] > fast["max_num_seqs"]
    assert slow["weights_memory_bytes"] < fast["weights_memory_bytes"]


def test_rates_are_measured_once(llama, tmp_path, monkeypatch):
    from octavo.wiring.fitting import machine_rates

    plan = fitter(llama).fit(64 * GIB).plan
    path = tmp_path / "rates.json"
    first = machine_rates.get_ceilings(plan, path)
    monkeypatch.setattr(machine_rates, "build_backend", lambda config: pytest.fail("measured"))
    assert machine_rates.get_ceilings(plan, path) == first and first.bandwidth > 0
    rate = machine_rates.get_disk_rate(Path(tmp_path), path)
    assert rate is None or machine_rates.get_disk_rate(Path(tmp_path), path) == rate


def test_rates_are_measured_again_on_another_day(llama, tmp_path):
    from octavo.wiring.fitting import machine_rates

    plan = fitter(llama).fit(64 * GIB).plan
    path = tmp_path / "rates.json"
    slow = replace(machine_rates.get_ceilings(plan, path), bandwidth=1.0)
    entries = json.loads(path.read_text())
    (key,) = entries.keys() - {"day"}
    entries[key]["bandwidth"] = slow.bandwidth
    path.write_text(json.dumps(entries))
    assert machine_rates.get_ceilings(plan, path) == slow
    path.write_text(json.dumps({**entries, "day": "2020-01-01"}))
    assert machine_rates.get_ceilings(plan, path).bandwidth > 1
