"""Adapters on the backends: PEFT's model is the oracle, and a row's bits depend on its own adapter
alone.
"""

import numpy as np
import pytest
import torch

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import supported_levels
from octavo.models.registry import build_programs
from octavo.program.passes.adapters import with_sites
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.peft_adapters import peft_logits, read_adapter, save_adapter
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

TOKENS = [5, 17, 3, 99, 42, 150, 7, 8, 23, 60, 11, 200, 31, 77, 2, 9, 120, 18, 55]

KINDS = {
    "plain": {"r": 4, "lora_alpha": 8},
    "patterns": {
        "r": 3,
        "lora_alpha": 5,
        "rank_pattern": {r"layers\.0\..*": 7, "h.1.mlp.c_fc": 9, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"q_proj": 11, "c_attn": 2},
        "use_rslora": True,
    },
    "dora": {"r": 5, "lora_alpha": 9, "use_dora": True},
    "bias": {"r": 4, "lora_alpha": 8, "bias": "lora_only"},
    "ends": {"r": 6, "lora_alpha": 6},
}
TARGETS = {
    "ends": {
        "llama": ["embed_tokens", "lm_head", "q_proj"],
        "gpt2": ["wte", "c_attn"],
        "qwen2": ["embed_tokens", "v_proj"],
        "gpt_neox": ["embed_in", "lm_head"],
        "gemma3n_text": ["embed_tokens", "embed_tokens_per_layer", "lm_head"],
        "nemotron_h": ["embeddings", "lm_head", "in_proj"],
    }
}
FAMILIES = ("llama", "qwen2", "gpt2", "gemma3_text", "phi3", "gpt_neox", "qwen2_moe")
CASES = [
    *((family, "plain") for family in FAMILIES),
    *((family, kind) for family in ("llama", "gpt2") for kind in ("patterns", "dora", "ends")),
    *((family, "bias") for family in ("qwen2", "gpt2")),
    *((family, "ends") for family in ("gpt_neox", "gemma3n_text", "nemotron_h")),
]
ONLY_ATTENTION = {"qwen2_moe": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def adapter_of(family, kind, folder, seed=0):
    tiny = tiny_model(family)
    targets = TARGETS.get(kind, {}).get(family) or ONLY_ATTENTION.get(family)
    more = {"target_modules": targets} if targets else {}
    return tiny, save_adapter(tiny, folder, seed=seed, **KINDS[kind], **more)


def runner_of(backend, family, *adapters, dtype="auto", level=None, **options):
    """Returns a runner of the model with adapters in slots 0 and on, kept in a precision; of the
    native backend at a level, where one is given.
    """
    tiny = tiny_model(family)
    if level is None:
        made = backend_named(backend, **options)
    else:
        made = NativeBackend(BackendOptions(num_threads=1), level=level)
    runner = PagedRunner(tiny.path, made, rewrite=with_sites)
    slots = runner.runnables["decoder"].adapters
    for slot, path in enumerate(adapters):
        slots.put(slot, slots.pack(read_adapter(tiny.path, path, dtype=dtype).updates))
    return runner


TOLERANCE = {"reference": 1e-6, "native": 1e-4, "torch": 1e-4}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_peft(backend, family, kind, tmp_path):
    """Logits equal those of PEFT's model in float64, within a share of the largest: 1e-6 on the
    reference, 1e-4 with weights in float32 elsewhere.
    """
    tiny, path = adapter_of(family, kind, tmp_path)
    runner = runner_of(backend, family, path)
    base, got = runner.logits(TOKENS), runner.logits(TOKENS, adapter=0)
    wanted = peft_logits(tiny, path, TOKENS)
    assert np.abs(got - wanted).max() <= TOLERANCE[backend] * np.abs(wanted).max()
    assert np.abs(got - base).max() > 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("backend", "options"),
    [("torch", {}), *(("native", {"level": level}) for level in supported_levels())],
)
def test_every_kernel_computes_what_the_reference_does(backend, options, dtype, tmp_path):
    """Adapters in fewer bits: logits of rows of one adapter, of several and of none are those of
    the reference, which has the same numbers, within 1e-4 of the largest. Ranks are odd too.
    """
    kinds = ("patterns", "ends", "dora")
    paths = [adapter_of("llama", kind, tmp_path / kind)[1] for kind in kinds]
    runner = runner_of(backend, "llama", *paths, dtype=dtype, **options)
    reference = runner_of("reference", "llama", *paths, dtype=dtype)
    slots = [0, 1, 2, -1, *[1] * 9, 0, 2]
    wanted = {slot: reference.logits(TOKENS, adapter=slot) for slot in set(slots)}
    requests = [runner.add(TOKENS, adapter=slot) for slot in slots]
    made = runner.step([(request, 0, len(TOKENS)) for request in requests])["logits"]
    for slot, got in zip(slots, made.reshape(len(slots), len(TOKENS), -1), strict=True):
        assert np.abs(got - wanted[slot]).max() <= 1e-4 * np.abs(wanted[slot]).max()


@pytest.mark.parametrize("kind", ["plain", "patterns", "dora", "ends"])
def test_int8_is_near_what_was_trained(kind, tmp_path):
    """An adapter's change of the logits moves by a few hundredths in int8, also where the change is
    as large as the logits.
    """
    path = adapter_of("llama", kind, tmp_path)[1]
    exact, approximate = (
        runner_of("reference", "llama", path, dtype=dtype) for dtype in ("float32", "int8")
    )
    wanted = exact.logits(TOKENS, adapter=0)
    change = np.linalg.norm(wanted - exact.logits(TOKENS))
    error = np.linalg.norm(approximate.logits(TOKENS, adapter=0) - wanted)
    assert 0 < error < 0.1 * change


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_depends_on_its_own_adapter_alone(backend, family, dtype, tmp_path):
    """Logits are bitwise the same alone, in chunks, and beside requests of other adapters and of
    none; without an adapter they are those of the plain Program.
    """
    paths = [adapter_of(family, kind, tmp_path / kind)[1] for kind in ("plain", "ends", "dora")]
    options = {"batch_invariant": True} if backend == "torch" else {}
    runner = runner_of(backend, family, *paths, dtype=dtype, **options)
    plain = PagedRunner(tiny_model(family).path, backend_named(backend, **options))
    slots = [2, -1, 0, 1, 0, -1, 1, 2]
    alone = [runner.logits(TOKENS, adapter=slot) for slot in slots]
    np.testing.assert_array_equal(alone[1], plain.logits(TOKENS))
    for slot, wanted in zip(slots[:4], alone[:4], strict=True):
        np.testing.assert_array_equal(runner.logits(TOKENS, 3, adapter=slot), wanted)
    requests = [runner.add(TOKENS, adapter=slot) for slot in slots]
    for start, stop in ((0, 5), (5, 18), (18, 19)):
        made = runner.step([(request, start, stop) for request in requests])["logits"]
        rows = made.reshape(len(slots), stop - start, -1)
        for got, wanted in zip(rows, alone, strict=True):
            np.testing.assert_array_equal(got, wanted[start:stop])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_packed_weights_keep_the_bits_of_a_row(quantization, tmp_path):
    """A row of 200 on packed weights and two threads has the same bits in blocks and in chunks, and
    adapters change what these weights give as they change what float ones give.
    """
    tiny = tiny_model("olmo2", intermediate_size=96)
    path = save_adapter(tiny, tmp_path, **KINDS["plain"])
    checkpoint = open_checkpoint(tiny.path)
    program = build_programs(checkpoint.config)["decoder"]
    load = WeightReader(checkpoint, "auto", quantization, program).load
    backend = NativeBackend(BackendOptions(num_threads=2))
    runner = PagedRunner(tiny.path, backend, load=load, rewrite=with_sites)
    slots = runner.runnables["decoder"].adapters
    slots.put(0, slots.pack(read_adapter(tiny.path, path).updates))
    tokens = (TOKENS * 11)[:200]
    whole = runner.logits(tokens, adapter=0)
    np.testing.assert_array_equal(runner.logits(tokens, 37, adapter=0), whole)
    change = whole - runner.logits(tokens)
    exact = PagedRunner(tiny.path, rewrite=with_sites)
    slots = exact.runnables["decoder"].adapters
    slots.put(0, slots.pack(read_adapter(tiny.path, path).updates))
    wanted = exact.logits(tokens[:20], adapter=0) - exact.logits(tokens[:20])
    error = np.linalg.norm(change[:20] - wanted) / np.linalg.norm(wanted)
    assert error < 0.2


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_same", [1, 2, 7, 8, 13])
def test_rows_of_one_adapter_together_have_the_bits_of_one(num_same, num_threads, dtype, tmp_path):
    """Kernels take up to eight rows of an adapter at a time, whichever rows lie between them, and
    threads share the ranks of a few rows; the ranks here are no multiples of what they take.
    """
    paths = [adapter_of("llama", kind, tmp_path / kind)[1] for kind in ("patterns", "dora")]
    alone = runner_of("native", "llama", *paths, dtype=dtype)
    wanted = [alone.logits(TOKENS, adapter=slot) for slot in (0, 1, -1)]
    runner = runner_of("native", "llama", *paths, dtype=dtype, num_threads=num_threads)
    slots = [slot for _ in range(num_same) for slot in (0, 1, -1)][: max(3, 3 * num_same - 1)]
    requests = [runner.add(TOKENS, adapter=slot) for slot in slots]
    runner.step([(request, 0, 17) for request in requests])
    made = runner.step([(request, 17, 18) for request in requests])["logits"]
    for slot, got in zip(slots, made, strict=True):
        np.testing.assert_array_equal(got, wanted[slot][17])


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_a_slot_is_taken_again(backend, tmp_path):
    """The second adapter of a slot is computed as if it had been there from the start."""
    first, second = (
        adapter_of("llama", kind, tmp_path / kind)[1] for kind in ("patterns", "plain")
    )
    runner = runner_of(backend, "llama", first)
    before = runner.logits(TOKENS, adapter=0)
    slots = runner.runnables["decoder"].adapters
    slots.drop(0)
    assert slots.num_bytes == 0
    slots.put(0, slots.pack(read_adapter(tiny_model("llama").path, second).updates))
    wanted = runner_of(backend, "llama", second).logits(TOKENS, adapter=0)
    np.testing.assert_array_equal(runner.logits(TOKENS, adapter=0), wanted)
    assert not np.array_equal(before, wanted)
