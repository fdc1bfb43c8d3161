"""Stored prefixes that are loaded in part: what is left out weighs least, a request reads all but
that and leaves nothing behind for others, all of a prefix is the engine without the policy, and
what cannot be weighed is refused.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.checkpoint.open import open_header
from octavo.checkpoint.weights import WeightReader
from octavo.config.engine_config import EngineConfig
from octavo.engine.kv.tier_slots import TierSlots
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_messages import BlockKey
from octavo.engine.recording.recorder import read_log
from octavo.engine.recording.replay import Replay
from octavo.executor.kv import BLOCK_SIZE
from octavo.models.registry import build_programs
from octavo.program.program import Weight
from octavo.server.openai.formatter import make_fingerprint
from octavo.sparsity import important_blocks
from octavo.sparsity.config_hooks import SparsityConfigHooks
from octavo.sparsity.important_blocks import PromptPart, important, query_about
from octavo.sparsity.passes.probe_prefixes import GROUP, get_probe, probe_prefixes, probing_part
from octavo.sparsity.prefix_weigher import attention_masses
from octavo.wiring.model import derive_from
from octavo.worker.kv_connectors import tiers
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.native_harness import require_native
from tests.support.tiny_models import double_precision, in_float64, tiny_model

PROMPTS = prompts_of(150, 190, 33, 215)
PARAMS = [
    msgspec.structs.replace(GREEDY, max_tokens=20),
    SAMPLED,
    PENALISED,
    msgspec.structs.replace(SAMPLED, n=2),
]
SHORT = msgspec.structs.replace(GREEDY, max_tokens=1)


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def engine(directory: Any, load: float | None, **options: Any) -> LLM:
    weighed = (
        {} if load is None else {"prefix_cache_policy": "importance", "prefix_cache_load": load}
    )
    usual = {"backend": "native", "prefix_cache_dir": str(directory)}
    return make_llm("llama", **usual | weighed | options)


def stored(directory: Any, load: float, **options: Any) -> None:
    """Has an engine that ends leave all prompts in files."""
    with engine(directory, load, **options) as llm:
        llm.generate(PROMPTS, SHORT)


def results(llm: LLM, some: list[int]) -> list[Any]:
    outputs = llm.generate([PROMPTS[i] for i in some], [PARAMS[i] for i in some])
    return [fingerprint(output) for output in outputs]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_whole_prefix_is_the_engine_without_the_policy(tmp_path, backend):
    with engine(tmp_path / "without", None, backend=backend) as llm:
        expected = results(llm, [0, 1, 2, 3])
    stored(tmp_path / "with", 1.0, backend=backend)
    with engine(tmp_path / "with", 1.0, backend=backend) as llm:
        assert results(llm, [0, 1, 2, 3]) == expected
        stats = llm.get_metrics()
    assert stats.external_hit_tokens > 0 and stats.left_out_blocks == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_alone_is_a_request_in_company(tmp_path, dtype):
    stored(tmp_path, 0.5, dtype=dtype)
    expected = []
    for index in range(len(PROMPTS)):
        with engine(tmp_path, 0.5, dtype=dtype) as llm:
            expected += results(llm, [index])
            assert (llm.get_metrics().left_out_blocks > 0) == (index != 2)
    ways: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 7, "threads": 3},
        {"num_scheduler_steps": 1},
    ]
    for way in ways:
        with engine(tmp_path, 0.5, dtype=dtype, **way) as llm:
            assert results(llm, [0, 1, 2, 3]) == expected, way
    with engine(tmp_path, None, dtype=dtype) as llm:
        assert results(llm, [0, 1, 2, 3]) != expected


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_request_goes_on_without_the_same_blocks(tmp_path, mode):
    long = msgspec.structs.replace(SAMPLED, max_tokens=60, ignore_eos=True)
    prompts = PROMPTS[:2]
    stored(tmp_path, 0.5)
    with engine(tmp_path, 0.5) as llm:
        expected = [fingerprint(output) for output in llm.generate(prompts, long)]
        block_bytes = (64 << 20) // (llm.info.kv_capacity_tokens // 16)
    small = {"kv_cache_memory_bytes": 17 * block_bytes, "preemption_mode": mode}
    with engine(tmp_path, 0.5, **small) as llm:
        outputs = llm.generate(prompts, long)
        stats = llm.get_metrics()
    assert stats.num_preemptions > 0 and stats.left_out_blocks > 0
    assert [fingerprint(output) for output in outputs] == expected


def test_what_is_computed_so_is_not_found_again(tmp_path):
    stored(tmp_path, 0.3)
    (exact,) = plain([PROMPTS[0]])
    with engine(tmp_path, 0.3) as llm:
        (first,) = llm.generate([PROMPTS[0]], PARAMS[0])
        assert fingerprint(first) != exact and first.num_cached_tokens == 144
        assert llm.get_metrics().left_out_blocks > 0
        following = [*PROMPTS[0], *first.outputs[0].token_ids, 7, 8, 9]
        (second,) = llm.generate([following], SHORT)
        assert second.num_cached_tokens == 144
    with engine(tmp_path, 0.3) as llm:
        (third,) = llm.generate([following], SHORT)
        # What the second prompt computed stands on the first one's whole blocks, where it was
        # exact, and on none where it was not.
        assert third.num_cached_tokens in (144, 160)


def plain(prompts: list[list[int]]) -> list[Any]:
    with make_llm("llama", backend="native", enable_prefix_caching=False) as llm:
        return [fingerprint(output) for output in llm.generate(prompts, PARAMS[0])]


def test_a_token_reads_all_but_what_is_left_out(tmp_path, monkeypatch):
    """Transformers, in float64, with the left-out keys masked for the tokens that are computed."""
    read = {0, 3, 7, 8}
    monkeypatch.setattr(important_blocks, "important", lambda masses, share: read)
    stored(tmp_path, 0.5, backend="reference")
    with engine(tmp_path, 0.5, backend="reference") as llm:
        (output,) = llm.generate([PROMPTS[0]], SHORT)
        assert llm.get_metrics().left_out_blocks == 5
    (found,) = output.outputs[0].logprobs
    length, num_found = len(PROMPTS[0]), 144
    places = np.arange(length)
    is_read = places[None] <= places[:, None]
    left_out = np.isin(places // BLOCK_SIZE, sorted(set(range(9)) - read))
    is_read[num_found:] &= ~left_out
    with double_precision(), torch.no_grad():
        mask = torch.where(torch.tensor(is_read), 0.0, -1e30)[None, None].double()
        model = in_float64(tiny_model("llama").model)
        logits = model(torch.tensor([PROMPTS[0]]), attention_mask=mask).logits[0, -1]
    expected = torch.log_softmax(logits.double(), -1)
    for token_id, each in found.items():
        assert abs(each.logprob - expected[token_id].item()) < 1e-6


def test_blocks_that_cannot_be_weighed_are_all_loaded(tmp_path, monkeypatch):
    stored(tmp_path, 0.5)

    def failing(*args: Any) -> None:
        raise RuntimeError("no masses")

    monkeypatch.setattr("octavo.sparsity.prefix_weigher.attention_masses", failing)
    with engine(tmp_path, 0.5) as llm:
        assert results(llm, [0])[0] == plain([PROMPTS[0]])[0]
        stats = llm.get_metrics()
    assert stats.left_out_blocks == 0 and stats.external_hit_tokens == 144


def test_a_file_that_has_gone_ends_the_prefix_there(tmp_path, monkeypatch):
    monkeypatch.setattr(important_blocks, "important", lambda masses, share: {0, 3, 7, 8})
    stored(tmp_path, 0.5)
    with engine(tmp_path, 0.5) as llm:
        for path in tmp_path.rglob("*-0.kv"):
            path.write_bytes(b"damaged")
        (output,) = llm.generate([PROMPTS[0]], SHORT)
        assert output.error is None and output.num_cached_tokens == 0


def test_masses_are_those_of_softmax():
    random = np.random.default_rng(5)
    queries = random.normal(size=(3, 4, 8)).astype(np.float32)
    keys = random.normal(size=(5, BLOCK_SIZE, 2, 8)).astype(np.float32)
    flat, expected = keys.reshape(-1, 2, 8), np.zeros(5)
    for query in queries:
        for head in range(4):
            scores = np.exp(0.3 * flat[:, head // 2] @ query[head])
            expected += (scores / scores.sum()).reshape(5, BLOCK_SIZE).sum(axis=1) / 12
    found = attention_masses(queries, keys, 0.3)
    assert np.allclose(found, expected, atol=1e-6) and np.isclose(found.sum(), 1)


@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "bf16"])
def test_the_reference_weighs_alike(tmp_path, monkeypatch, kv_cache_dtype):
    """Both read keys and queries out of blocks of their own layouts."""
    seen: list[list[float]] = []

    def record(masses: list[float], share: float) -> set[int]:
        seen.append(masses)
        return important(masses, share)

    monkeypatch.setattr(important_blocks, "important", record)
    for backend in ("native", "reference"):
        options = {"backend": backend, "kv_cache_dtype": kv_cache_dtype, "dtype": "float32"}
        stored(tmp_path / backend, 0.5, **options)
        with engine(tmp_path / backend, 0.5, **options) as llm:
            llm.generate([PROMPTS[1]], SHORT)
    native, reference = seen
    assert len(native) == 11 and abs(sum(native) - 1) < 1e-6
    assert max(native) > 1.1 / 11, "the blocks differ"
    assert np.abs(np.array(native) - reference).max() < (1e-5 if kv_cache_dtype == "fp32" else 3e-3)


@pytest.mark.parametrize(
    ("masses", "share", "expected"),
    [
        ([0.1] * 10, 0.5, {0, 1, 2, 8, 9}),
        ([0, 0, 0, 0.6, 0, 0.4, 0, 0, 0, 0], 0.5, {0, 3, 5, 8, 9}),
        ([0, 0.5, 0.2, 0.3], 0.05, {0, 1, 2, 3}),
        ([0, 0.1, 0.5, 0.1, 0, 0], 0.05, {0, 2, 4, 5}),
        ([0.2, 0.1, 0.5, 0.1, 0.1], 1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_the_heaviest_blocks_are_loaded(masses, share, expected):
    assert important(masses, share) == expected


def test_a_probe_has_the_beginning_and_the_end_of_a_prompt():
    token_ids = list(range(1000, 1400))
    probe = query_about(PromptPart(token_ids, 10, BLOCK_SIZE), "one", 23)
    places = [*range(16), *range(288, 400)]
    assert probe.token_ids == [1000 + place for place in places]
    assert probe.positions == [10 + place for place in places]
    assert probe.num_queries == 400 - 23 * BLOCK_SIZE
    short = query_about(PromptPart(token_ids[:20], 0, BLOCK_SIZE), "two", 1)
    assert short.token_ids == token_ids[:20] and short.num_queries == 4


def test_important_blocks_stay_in_slots():
    slots = TierSlots(3)
    keys = [BlockKey(bytes([index]) * 16, b"", (index,)) for index in range(5)]
    for key, importance in zip(keys[:3], (2.0, 0.0, 1.0), strict=True):
        slot = slots.claim(key)
        assert slot is not None
        slot.ready, slot.rating = True, importance
        slots.release(slot)
    assert slots.claim(keys[3]) is not None
    assert slots.find(keys[1]) is None and slots.find(keys[0]) is not None
    assert slots.claim(keys[4]) is not None
    assert slots.find(keys[2]) is None and slots.find(keys[0]) is not None
    assert slots.claim(BlockKey(b"x" * 16, b"", (9,))) is not None
    assert slots.find(keys[0]) is None


def test_the_program_keeps_one_layer_more():
    program = build_programs(tiny_model("llama", num_hidden_layers=5).config)["decoder"]
    probed = probe_prefixes(program)
    group, probe = probed.group(GROUP), get_probe(probed)
    assert group.num_layers == 1 and group.k_width == program.groups[0].k_width
    assert probe.num_kv_heads == group.num_kv_heads and group.v_width == 0
    assert len(probed.ops) == len(program.ops) + 1


def test_the_part_ends_with_the_queries_of_the_layer_that_is_asked():
    program = build_programs(tiny_model("llama", num_hidden_layers=5).config)["decoder"]
    part, probe = probing_part(probe_prefixes(program)), get_probe(probe_prefixes(program))
    (queries,) = part.outputs.values()
    assert queries.width == probe.num_heads * program.groups[0].k_width
    assert [(group.name, group.num_layers) for group in part.groups] == [
        (program.groups[0].name, 2)
    ]
    assert set(part.weights) < set(program.weights)


@pytest.mark.parametrize(("backend", "quantization"), [("native", "int8"), ("reference", None)])
def test_the_part_reads_the_weights_of_the_whole(tmp_path, monkeypatch, backend, quantization):
    loads: Counter[str] = Counter()
    load = WeightReader.load

    def counted(reader: WeightReader, weight: Weight) -> Any:
        loads[weight.name] += 1
        return load(reader, weight)

    monkeypatch.setattr(WeightReader, "load", counted)
    options = {"backend": backend, "quantization": quantization, "max_num_batched_tokens": 16}
    stored(tmp_path, 0.5, **options)
    assert len(loads) > 10 and set(loads.values()) == {1}
    with engine(tmp_path, 0.5, **options) as llm:
        results(llm, [0])
        assert llm.get_metrics().left_out_blocks > 0


def test_an_answer_that_comes_too_late_leaves_nothing_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "OVERDUE_S", 0.2)
    answered = threading.Event()

    def slow(queries: Any, keys: Any, scale: float) -> Any:
        answered.wait(30)
        return attention_masses(queries, keys, scale)

    monkeypatch.setattr("octavo.sparsity.prefix_weigher.attention_masses", slow)
    stored(tmp_path, 0.5)
    with engine(tmp_path, 0.5) as llm:
        # The thread that weighs also reads, so the blocks are late as well, and computed.
        found = results(llm, [0])[0]
        stats = llm.get_metrics()
        answered.set()
    assert found == plain([PROMPTS[0]])[0] and stats.left_out_blocks == 0


def test_keys_that_do_not_come_weigh_nothing(tmp_path):
    """Without the keys of one block the prefix ends there, and the others are all loaded."""
    stored(tmp_path, 0.5)
    with engine(tmp_path, 0.5) as llm:
        keys = BlockChain(BlockHashing()).extend(PROMPTS[0], 5, BLOCK_SIZE)
        (path,) = tmp_path.rglob(f"{keys[4].digest.hex()}-1.kv")
        path.write_bytes(b"damaged")
        (output,) = llm.generate([PROMPTS[0]], PARAMS[0])
        assert llm.get_metrics().left_out_blocks == 0
    assert output.num_cached_tokens == 4 * BLOCK_SIZE
    assert fingerprint(output) == plain([PROMPTS[0]])[0]


def test_it_is_named(tmp_path):
    options = {
        "model": str(tiny_model("llama").path),
        "backend": "native",
        "prefix_cache_dir": str(tmp_path),
        "prefix_cache_policy": "importance",
    }
    whole = EngineConfig.from_options(**options)
    half = EngineConfig.from_options(**options, prefix_cache_load=0.5)
    assert SparsityConfigHooks().describe(whole) == []
    (line,) = SparsityConfigHooks().describe(half)
    assert "skip up to 50% of the stored prefix blocks" in line
    assert make_fingerprint(whole) != make_fingerprint(half)
    stored(tmp_path, 0.5)
    with engine(tmp_path, None) as llm:
        # An engine that computes otherwise finds none of these files.
        (output,) = llm.generate([PROMPTS[0]], SHORT)
        assert output.num_cached_tokens == 0


def test_an_engine_process_takes_the_options_that_were_derived(tmp_path):
    options = {"prefix_cache_dir": str(tmp_path), "prefix_cache_policy": "importance"}
    path = tiny_model("llama").path
    config, _ = derive_from(
        EngineConfig.from_options(model=str(path), **options), open_header(path)
    )
    assert EngineConfig.from_options(**config.to_options()) == config
    EngineConfig.from_options(model=str(path), **options, spec_method="none")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a load alone": (
        {"prefix_cache_policy": "lru"},
        "prefix_cache_load: requires prefix_cache_policy importance",
    ),
    "too little": ({"prefix_cache_load": 0.01}, "got 0.01, expected 0.05 to 1"),
    "too much": ({"prefix_cache_load": 1.5}, "got 1.5, expected 0.05 to 1"),
    "no files": (
        {"prefix_cache_dir": None},
        "got importance, expected lru without prefix_cache_dir",
    ),
    "torch": ({"backend": "torch"}, "got importance, expected lru with the backend torch"),
    "ranks": (
        {"tensor_parallel_size": 2},
        "got importance, expected lru with tensor_parallel_size",
    ),
    "speculation": ({"spec_method": "ngram"}, "got importance, expected lru with spec_method"),
    "chosen keys": (
        {"kv_selection": "speculated"},
        "got importance, expected lru with kv_selection",
    ),
    "adapters": ({"enable_lora": True}, "got importance, expected lru with enable_lora"),
    "streamed weights": (
        {"weights_memory_bytes": 1 << 30, "weights_dir": "."},
        "got importance, expected lru with weights_memory_bytes",
    ),
    "predicted neurons": (
        {"sparsity_predictor": "none.json", "quantization": "int8"},
        "got importance, expected lru with sparsity_predictor",
    ),
    "codes": ({"kv_cache_dtype": "int8"}, "got importance, expected lru with kv_cache_dtype int8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_weighed_is_refused(tmp_path, case):
    options, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        engine(tmp_path, 0.5, **options)
    assert message in str(caught.value)


def test_what_weighs_takes_none_of_the_requests_blocks(tmp_path):
    with engine(tmp_path, 0.5, kv_cache_memory_bytes=None, max_num_seqs=1) as llm:
        assert llm.info.kv_capacity_tokens == 256
        (output,) = llm.generate([[5] * 250], SHORT)
    assert output.error is None


@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v3", "bloom"])
def test_models_whose_keys_depend_on_their_places_are_refused(tmp_path, family):
    with pytest.raises(ConfigError, match="importance is not supported by"):
        make_llm(
            family,
            prefix_cache_dir=str(tmp_path),
            prefix_cache_policy="importance",
            prefix_cache_load=0.5,
        )


def test_beams_go_without_the_same_blocks(tmp_path):
    """Rows that branch off share the holes of the row that they come from."""
    params = SamplingParams(beam_width=3, max_tokens=30, temperature=0, ignore_eos=True)
    stored(tmp_path, 0.5)
    expected = None
    for way in ({}, {"max_num_batched_tokens": 7, "threads": 3}, {"backend": "reference"}):
        if "backend" in way:
            stored(tmp_path, 0.5, **way)
        with engine(tmp_path, 0.5, **way) as llm:
            outputs = llm.generate(PROMPTS[:2], params)
            assert llm.get_metrics().left_out_blocks > 0
        found = [[beam.token_ids for beam in output.outputs] for output in outputs]
        expected = expected or found
        assert found == expected, way


def test_a_recorded_engine_chooses_the_same_blocks(tmp_path):
    """A replay plans the same steps: choices follow from what the worker has reported."""
    stored(tmp_path / "files", 0.5)
    path = tmp_path / "recording"
    with engine(tmp_path / "files", 0.5, record=str(path)) as llm:
        results(llm, [0, 1, 2, 3])
        assert llm.get_metrics().left_out_blocks > 0
    header, events = read_log(path)
    assert Replay(header).run(events).differences == []
