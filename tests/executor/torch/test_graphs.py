"""Captured decode steps against eager ones: padded to a size, replayed over the same buffers.
Within 1e-5 of the largest logit, because products of more rows may round otherwise; bitwise at a
captured size.

On the CPU a replay is the captured call itself, over the same views of the staging buffer; CUDA's
own graphs need CUDA.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from octavo.checkpoint.open import open_checkpoint
from octavo.executor.base import BackendOptions
from octavo.executor.batch import LastTokens
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.graphs import CudaGraphs, GraphShape, shapes_up_to, sizes_up_to
from octavo.models.registry import build_programs
from octavo.program.passes.adapters import with_sites
from tests.executor.native.test_sampling import random_batch
from tests.support.paged_runner import PagedRunner
from tests.support.peft_adapters import read_adapter, save_adapter
from tests.support.tiny_models import tiny_model

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
WIDTH = 5


@dataclass
class Again:
    """A stand-in for a graph, which runs the captured call again."""

    run: object
    replays: int = 0

    def replay(self):
        self.replays += 1
        return self.run()


class Recorder:
    def __init__(self):
        self.graphs = []

    def __call__(self, run):
        run()
        self.graphs.append(Again(run))
        return self.graphs[-1]


def runners(family, record, device="cpu", sizes=(1, 2, 4)):
    """Returns a runner with graphs of these sizes and one without, each with five requests whose
    prompts are computed.
    """
    made = []
    for capture in (True, False):
        runner = PagedRunner(
            tiny_model(family).path, TorchBackend(BackendOptions(num_threads=1), device), seed=3
        )
        if capture:
            shapes = [GraphShape(size, 1) for size in sizes]
            runner.runnables["decoder"].capture(runner.kv, shapes, WIDTH, record)
        ids = np.random.default_rng(0).integers(3, 200, (5, 70))
        requests = [runner.add(row) for row in ids]
        for index, request in enumerate(requests):
            runner.step([(request, 0, 3 + 13 * index)])
        made.append((runner, requests))
    return made


def decode(runner, requests, step):
    return runner.step(
        [
            (request, 3 + 13 * index + step, 4 + 13 * index + step)
            for index, request in enumerate(requests)
        ]
    )["logits"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_captured_is_eager(family):
    record = Recorder()
    (graphs, mine), (eager, theirs) = runners(family, record)
    for step, count in enumerate([1, 2, 3, 4, 3, 1, 4]):
        found, wanted = decode(graphs, mine[:count], step), decode(eager, theirs[:count], step)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * abs(wanted).max())
    assert [graph.replays for graph in record.graphs] == [4, 1, 2], "largest first"


def test_what_is_no_decode_of_a_captured_size_runs_eagerly():
    record = Recorder()
    (graphs, mine), (eager, theirs) = runners("llama", record)
    wanted = decode(eager, theirs, 0)
    np.testing.assert_array_equal(decode(graphs, mine, 0), wanted)
    spans = [(mine[0], 4, 6), (mine[1], 17, 18)]
    np.testing.assert_array_equal(
        graphs.step(spans)["logits"],
        eager.step([(theirs[0], 4, 6), (theirs[1], 17, 18)])["logits"],
        err_msg="two rows of one request",
    )
    assert not any(graph.replays for graph in record.graphs)


def test_draws_of_a_captured_step(monkeypatch):
    """Tokens are drawn for the real rows, however much of the staging buffer the draws' arrays
    take.
    """
    (graphs, mine), (eager, theirs) = runners("llama", Recorder(), sizes=(4,))
    sampling = random_batch(3, 320, 4)
    results = []
    for runner, requests in ((graphs, mine[:3]), (eager, theirs[:3])):
        batch = runner.batch(
            [(r, 3 + 13 * i, 4 + 13 * i) for i, r in enumerate(requests)],
            runner.programs["decoder"],
        )
        batch.sampling = sampling
        results.append(runner.runnables["decoder"].run(batch, runner.kv).samples)
    np.testing.assert_array_equal(results[0].token_ids, results[1].token_ids)
    np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=1e-5)


@pytest.mark.parametrize(("invariant", "head_rows"), [(False, 128), (False, 2), (True, 128)])
def test_last_tokens_stay_on_the_device(monkeypatch, invariant, head_rows):
    """A step that is launched before the results of the step before are asked for takes the tokens
    that it drew: replayed from graphs, eagerly, and row by row.
    """
    monkeypatch.setattr("octavo.executor.torch.program.HEAD_ROWS", head_rows)
    ids, results = np.random.default_rng(0).integers(3, 200, (3, 20)), []
    for capture, launches in ((False, False), (True, True), (False, True)):
        options = BackendOptions(num_threads=1, batch_invariant=invariant)
        runner = PagedRunner(tiny_model("llama").path, TorchBackend(options, "cpu"), seed=3)
        runnable, record = runner.runnables["decoder"], Recorder()
        if capture and not invariant:
            runnable.capture(runner.kv, [GraphShape(4, 1)], WIDTH, record)
        requests = [runner.add(row) for row in ids]
        runner.step([(request, 0, 7) for request in requests])
        drawn, under_way = [], []
        for step in range(4):
            batch = runner.batch(
                [(request, 7 + step, 8 + step) for request in requests], runner.programs["decoder"]
            )
            batch.sampling = random_batch(3, 320, step)
            if drawn or under_way:
                batch.token_ids = drawn[-1] if drawn else np.full(3, 1, np.int32)
            if launches:
                sources = (
                    np.full(3, -1, np.int32) if not under_way else np.array([5, 2, 9], np.int32)
                )
                batch.last_tokens = LastTokens(sources, np.array([5, 2, 9], np.int32))
                under_way.append(runnable.launch(batch, runner.kv))
            else:
                drawn.append(runnable.run(batch, runner.kv).samples.token_ids)
        results.append(np.stack(drawn or [step.result().samples.token_ids for step in under_way]))
        assert sum(graph.replays for graph in record.graphs) == (
            4 if capture and not invariant else 0
        )
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])
    assert len(np.unique(results[0])) > 6


def test_steps_that_verify_drafts():
    """Requests with and without drafts share one graph; their rows are padded to as many."""
    pytest.importorskip("triton")
    tiny, record, runners = tiny_model("llama", num_hidden_layers=1), Recorder(), []
    options = BackendOptions(num_threads=1, attention_backend="triton")
    ids = np.random.default_rng(0).integers(3, 200, (3, 70))
    for _ in range(2):
        runner = PagedRunner(tiny.path, TorchBackend(options), seed=3)
        requests = [runner.add(row) for row in ids]
        runner.step([(request, 0, 20) for request in requests])
        runners.append((runner, requests))
    (graphs, mine), (eager, theirs) = runners
    shapes = [GraphShape(2, 1), GraphShape(2, 4), GraphShape(3, 4)]
    graphs.runnables["decoder"].capture(graphs.kv, shapes, WIDTH, record)
    steps = [[4, 1], [3, 4, 2], [1, 1], [4], [1, 1, 1], [5]]
    starts = [20, 20, 20]
    for counts in steps:
        spans = [(at, starts[at], starts[at] + count) for at, count in enumerate(counts)]
        found = graphs.step([(mine[at], start, stop) for at, start, stop in spans])["logits"]
        wanted = eager.step([(theirs[at], start, stop) for at, start, stop in spans])["logits"]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * abs(wanted).max())
        for at, count in enumerate(counts):
            starts[at] += count
    replays = [graph.replays for graph in record.graphs]
    assert replays == [1, 2, 1], "rows padded to more than twice as many, and 5 rows, run eagerly"


ADAPTERS = {
    "plain": {"r": 4, "lora_alpha": 8},
    "some": {"r": 20, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"]},
    "bias": {"r": 3, "lora_alpha": 6, "use_dora": True},
}


@pytest.mark.parametrize("kernels", ["plain", pytest.param("triton", marks=pytest.mark.slow)])
def test_steps_with_adapters(kernels, tmp_path):
    """Requests of several adapters and of none share one graph, also after one was replaced; rows
    of an adapter with gains run eagerly, and steps without adapters keep their graph.
    """
    tiny = tiny_model("llama", num_hidden_layers=1)
    paths = [
        save_adapter(tiny, tmp_path / name, seed=seed, **ADAPTERS[name])
        for seed, name in enumerate(["plain", "some", "bias"])
    ]
    paths.append(save_adapter(tiny, tmp_path / "other", seed=9, **ADAPTERS["plain"]))
    ids, record, runners = np.random.default_rng(0).integers(3, 200, (4, 40)), Recorder(), []
    options = BackendOptions(
        num_threads=1, torch_kernels=kernels, num_adapters=4, max_adapter_rank=20
    )
    for _ in range(2):
        runner = PagedRunner(tiny.path, TorchBackend(options), seed=3, rewrite=with_sites)
        slots = runner.runnables["decoder"].adapters
        packed = [slots.pack(read_adapter(tiny.path, path).updates) for path in paths]
        runners.append((runner, slots, packed))
    (graphs, slots, packed), (eager, its_slots, its_packed) = runners
    slots.reserve(4, 20, now=True)
    shapes = [GraphShape(4, 1), GraphShape(4, 1, True)]
    graphs.runnables["decoder"].capture(graphs.kv, shapes, WIDTH, record)
    # Before an adapter with gains is there, and after.
    for slot in (0, 1):
        slots.put(slot, packed[slot])
        its_slots.put(slot, its_packed[slot])
    adapters = [0, 1, -1, 0]
    made = [
        [runner.add(row, adapter=slot) for row, slot in zip(ids, adapters, strict=True)]
        for runner in (graphs, eager)
    ]

    def check(rows, at, replays):
        spans = [[(requests[row], at, at + 1) for row in rows] for requests in made]
        found, wanted = (
            runner.step(each)["logits"] for runner, each in zip((graphs, eager), spans, strict=True)
        )
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * abs(wanted).max())
        assert [graph.replays for graph in record.graphs] == replays
        return wanted

    for runner, requests in zip((graphs, eager), made, strict=True):
        runner.step([(request, 0, 10) for request in requests])
    before = check([0, 1, 2], 10, [0, 1])
    check([2], 11, [1, 1])
    slots.put(0, packed[3])
    its_slots.put(0, its_packed[3])
    after = check([0, 1, 2], 10, [1, 2])
    assert abs(after[0] - before[0]).max() > 1e-3 * abs(before).max()
    np.testing.assert_allclose(after[1:], before[1:], rtol=0, atol=1e-5 * abs(before).max())
    slots.put(1, packed[2])
    its_slots.put(1, its_packed[2])
    check([0, 1], 11, [1, 2])
    check([0, 2], 12, [1, 3])


def test_the_sizes():
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(5) == (1, 2, 4, 5)
    assert sizes_up_to(128)[-2:] == (96, 128)
    assert sizes_up_to(1000)[-1] == 512
    assert sizes_up_to(0) == ()
    assert [shape[:2] for shape in shapes_up_to(2)] == [(1, 1), (2, 1)]
    assert [shape[:2] for shape in shapes_up_to(2, 4)] == [(1, 1), (2, 1), (1, 5), (2, 5)]
    assert max(shape.num_rows for shape in shapes_up_to(512, 8)) <= 512


@pytest.mark.parametrize(
    ("options", "ranks", "why"),
    [
        ({}, None, ""),
        ({}, object(), "not with several ranks (tensor_parallel_size)"),
        ({"batch_invariant": True}, None, "not with batch_invariant"),
        (
            {"attention_backend": "sdpa"},
            None,
            "not with the attention of sdpa, which requires lengths on the host",
        ),
    ],
)
def test_what_keeps_a_device_s_decode_steps_from_being_captured(options, ranks, why):
    options = {"attention_backend": "triton"} | options
    backend = TorchBackend(BackendOptions(num_threads=1, **options), ranks=ranks)
    backend.device = torch.device("cuda")
    program = build_programs(open_checkpoint(tiny_model("llama").path).config)["decoder"]
    assert backend.against_graphs(program, torch.float32) == why
    assert (backend.graph_shapes(program, torch.float32) == ()) == bool(why)
    eager = TorchBackend(replace(backend.options, enforce_eager=True))
    eager.device = backend.device
    assert eager.graph_shapes(program, torch.float32) == ()


@CUDA
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_cuda_graphs_are_eager(family):
    (graphs, mine), (eager, theirs) = runners(family, CudaGraphs(), "cuda")
    for step, count in enumerate([1, 2, 4, 3, 1]):
        wanted = decode(eager, theirs[:count], step)
        np.testing.assert_allclose(
            decode(graphs, mine[:count], step), wanted, rtol=0, atol=1e-4 * abs(wanted).max()
        )
