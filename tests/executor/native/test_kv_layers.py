"""Layers of blocks as a step writes them: what the executor counts, and what is read of a block."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from octavo.executor.native.backend import NativeBackend
from tests.support.native_harness import require_native
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import tiny_model

TOKENS = [(7 * at) % 90 + 5 for at in range(80)]


def runner_of(family: str, num_threads: int) -> PagedRunner:
    require_native()
    return PagedRunner(tiny_model(family).path, backend_named("native", num_threads=num_threads))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe"])
def test_each_layer_is_counted_once_in_each_step(family: str, num_threads: int) -> None:
    """Steps of few rows go stage by stage, steps of many in ranges of stages."""
    runner = runner_of(family, num_threads)
    program: Any = runner.runnables["decoder"]
    layers = {(g, at) for g, one in enumerate(runner.groups) for at in range(one.num_layers)}
    assert sorted(program.kv_writes) == sorted(layers)
    request, (steps, _) = runner.add(TOKENS), program.kv_written
    for start, stop in ((0, 64), (64, 65), (65, 80)):
        runner.step([(request, start, stop)])
        steps += 1
        assert program.kv_written == (steps, len(layers))


def test_a_layer_is_part_of_its_block() -> None:
    runner = runner_of("gemma3_text", 1)
    request = runner.add(TOKENS)
    runner.step([(request, 0, len(TOKENS))])
    kv: Any = runner.kv
    for group, layout in enumerate(runner.layouts):
        whole = np.empty(layout.block_bytes, np.uint8)
        part = np.empty(layout.layer_bytes, np.uint8)
        block = int(request.blocks[group][2])
        kv.read_block(group, block, whole)
        assert whole.any()
        for layer in range(layout.group.num_layers):
            kv.read_layer(group, layer, block, part)
            start = layer * layout.layer_bytes
            np.testing.assert_array_equal(part, whole[start : start + layout.layer_bytes])


def test_what_is_not_there_is_refused() -> None:
    runner = runner_of("llama", 1)
    (layout,) = runner.layouts
    into: Any = np.empty(layout.layer_bytes, np.uint8)
    kv: Any = runner.kv
    for layer, block, memory in (
        (layout.group.num_layers, 0, into),
        (-1, 0, into),
        (0, 256, into),
        (0, 0, into[1:]),
    ):
        with pytest.raises(ValueError, match="is not in the KV memory"):
            kv.read_layer(0, layer, block, memory)


def test_a_layer_that_is_counted_is_whole_while_the_step_goes_on() -> None:
    """Another thread reads each layer as soon as the count says so: it has the bytes of the end."""
    runner = runner_of("llama", 2)
    assert isinstance(runner.backend, NativeBackend)
    program: Any = runner.runnables["decoder"]
    kv: Any = runner.kv
    (layout,) = runner.layouts
    seen: dict[int, np.ndarray] = {}
    goes_on = True
    request = runner.add(TOKENS)
    block, (first, _) = int(request.blocks[0][1]), program.kv_written

    def look() -> None:
        while goes_on or len(seen) < len(program.kv_writes):
            step, count = program.kv_written
            if step == first + 1:
                for _, layer in program.kv_writes[len(seen) : count]:
                    seen[layer] = np.empty(layout.layer_bytes, np.uint8)
                    kv.read_layer(0, layer, block, seen[layer])

    watcher = threading.Thread(target=look)
    watcher.start()
    runner.step([(request, 0, 64)])
    goes_on = False
    watcher.join(20)
    assert len(seen) == layout.group.num_layers
    found = np.empty(layout.layer_bytes, np.uint8)
    for layer, bytes_then in seen.items():
        kv.read_layer(0, layer, block, found)
        np.testing.assert_array_equal(found, bytes_then)
