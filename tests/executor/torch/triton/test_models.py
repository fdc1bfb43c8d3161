"""Whole tiny models with Triton's attention and KV writes against the reference, and which Programs
can be captured or are refused.

In fp32 within 3e-5 of the largest logit; chunks and padding as in the other tests of the torch
backend.
"""

import logging
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.api.errors import BackendUnavailable
from octavo.checkpoint.open import open_checkpoint
from octavo.executor.base import BackendOptions
from octavo.executor.torch.attention.choose import choose_attention, first_that_computes
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.graphs import GraphShape
from octavo.executor.torch.rope_write import RopeWrite
from octavo.executor.torch.triton.attention import MOST_STATE_BYTES
from octavo.models.registry import build_programs
from octavo.program import ops
from octavo.program.program import CacheGroup, Program, Value, Weight
from tests.executor.torch.test_graphs import Recorder
from tests.models.test_t5 import logits as t5_logits
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")
FUSED = {"llama", "qwen3", "gemma3_text", "gpt_oss"}
"""Families whose keys are rotated and written without an op between."""


def backend(**options):
    return TorchBackend(BackendOptions(num_threads=1, attention_backend="triton", **options))


def tokens(tiny, length):
    return np.random.default_rng(1).integers(0, tiny.config["vocab_size"], length)


def assert_close(found, wanted, bound=3e-5):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * abs(wanted).max())


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2"]
)
def test_families_in_chunks_beside_padding(family):
    tiny = tiny_model(family)
    ids = tokens(tiny, 75)
    runner = PagedRunner(tiny.path, backend(), padding=2)
    assert_close(runner.logits(ids, 37), PagedRunner(tiny.path).logits(ids))
    kinds = [type(each.op) for each in runner.runnables["decoder"].instructions.body]
    assert (RopeWrite in kinds) == (family in FUSED)


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
def test_caches_of_fewer_bits(kv):
    """Triton's KV write stores the same bytes as plain torch, and both read the same of them."""
    tiny = tiny_model("llama")
    ids = tokens(tiny, 60)
    plain = PagedRunner(
        tiny.path,
        TorchBackend(BackendOptions(num_threads=1, attention_backend="sdpa", kv_cache_dtype=kv)),
    )
    assert_close(
        PagedRunner(tiny.path, backend(kv_cache_dtype=kv)).logits(ids, 23),
        plain.logits(ids, 23),
        2e-3,
    )


def test_a_long_context_and_requests_together():
    tiny = tiny_model("llama", num_hidden_layers=2)
    ids = [tokens(tiny, length) for length in (530, 270, 40)]
    runner, truth = PagedRunner(tiny.path, backend()), PagedRunner(tiny.path)
    made = []
    for each in (runner, truth):
        requests = [each.add(row) for row in ids]
        each.step([(request, 0, len(row) - 2) for request, row in zip(requests, ids, strict=True)])
        first = each.step(
            [
                (request, len(row) - 2, len(row) - 1)
                for request, row in zip(requests, ids, strict=True)
            ]
        )["logits"]
        made.append(
            np.concatenate(
                [first, each.step([(requests[0], 529, 530), (requests[1], 268, 270)])["logits"]]
            )
        )
    assert_close(*made)


def test_encoder_and_decoder():
    path = tiny_model("t5").path
    assert_close(
        t5_logits(PagedRunner(path, backend(), padding=3), 7), t5_logits(PagedRunner(path))
    )


@pytest.mark.slow
def test_requests_that_begin_alike_share_reads_in_captured_steps():
    """Steps of 4 and of 3 requests, padded to a captured size of 4, share the reads of their own
    prefixes, not those of the captured step.
    """
    tiny = tiny_model("llama", num_hidden_layers=2)
    shared, width = tokens(tiny, 256), 20
    made = []
    for capture in (True, False):
        runner = PagedRunner(tiny.path, backend(shared_prefix_attention=capture))
        requests = [runner.add([*shared, *tokens(tiny, 20 + index)]) for index in range(4)]
        runner.step([(requests[0], 0, 256)])
        for request in requests[1:3]:
            request.blocks[:, :16] = requests[0].blocks[:, :16]
        runner.step([(requests[3], 0, 256)])
        runner.step([(request, 256, 260) for request in requests])
        if capture:
            record = Recorder()
            runner.runnables["decoder"].capture(runner.kv, [GraphShape(4, 1)], width, record)
        steps = [
            [(request, 260, 261) for request in requests],
            [(request, 261, 262) for request in requests[1:]],
        ]
        made.append(np.concatenate([runner.step(step)["logits"] for step in steps]))
    assert record.graphs[0].replays == 2
    assert_close(*made, 1e-5)


def test_what_states_of_splits_take():
    """The states of splits take m, l and a row of values for each head and split of 256 keys."""
    program = build_programs(open_checkpoint(tiny_model("llama").path).config)["decoder"]
    kernels = choose_attention(BackendOptions(attention_backend="triton"), CPU)[0]
    assert kernels.graph_bytes(program, 3, 1000) == 3 * 4 * 4 * 4 * (16 + 2)
    assert kernels.graph_bytes(program, 10**6, 10**6) == MOST_STATE_BYTES


# -- who is chosen ---------------------------------------------------------------------------------


def test_auto_is_sdpa_on_a_cpu():
    assert [choice.name for choice in choose_attention(BackendOptions(), CPU)] == ["sdpa"]
    assert [
        choice.name for choice in choose_attention(BackendOptions(attention_backend="triton"), CPU)
    ] == ["triton"]


def test_whose_numbers_they_are_is_part_of_what_a_stored_cache_depends_on():
    assert "attention with triton" in backend().numerics
    assert "attention with sdpa" in TorchBackend(BackendOptions()).numerics


def test_without_the_interpreter_a_cpu_refuses(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(
        BackendUnavailable,
        match="attention_backend: got 'triton', but Triton has no kernels for the device cpu",
    ) as caught:
        backend()
    assert "TRITON_INTERPRET=1" in caught.value.hint


def test_without_triton_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="Triton is not installed") as caught:
        backend()
    assert "pip install 'octavo[triton]'" in caught.value.hint


def test_torch_runs_without_importing_triton():
    code = "import sys, octavo.executor.torch.backend; print('triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert made.stdout.strip() == "False"


def expanded():
    """Returns a Program whose latent attention makes keys and values of each head."""
    nope, rope, out = (
        Value("nope", "tokens", 16),
        Value("rope", "tokens", 8),
        Value("out", "tokens", 12),
    )
    op = ops.MlaAttention(
        nope, rope, out, Weight("up", (28, 10)), "latent", 0, 2, 8, 4, 10, 6, 1.0, "expanded"
    )
    return Program(
        "decoder",
        {"hidden": nope},
        {"hidden": out},
        (op,),
        (CacheGroup("latent", "latent", 1, 1, 14, 0),),
    )


def test_what_its_kernels_do_not_take_is_refused_by_name_or_goes_to_another_which_is_logged(caplog):
    triton, sdpa = (
        choose_attention(BackendOptions(attention_backend=name), CPU)[0]
        for name in ("triton", "sdpa")
    )
    message = "cannot run attention with triton: expanded latent attention is not supported"
    with pytest.raises(BackendUnavailable, match=message):
        first_that_computes((triton,), expanded(), torch.float32)
    with caplog.at_level(logging.WARNING):
        assert first_that_computes((triton, sdpa), expanded(), torch.float32) is sdpa
    assert "attention of the decoder uses sdpa: triton: expanded latent attention" in caplog.text
    absorbed = replace(expanded(), ops=(replace(expanded().ops[0], form="absorbed"),))
    assert first_that_computes((triton, sdpa), absorbed, torch.float32) is triton
    with pytest.raises(BackendUnavailable, match="its kernels read no KV cache of float8_e5m2"):
        first_that_computes((triton,), absorbed, torch.float8_e5m2)
