"""How often Triton would compile each kernel while steps of many sizes run. Launches are recorded
in the interpreter; their keys are those that Triton computes for an H100.
"""

import inspect
from collections import defaultdict

import numpy as np
import pytest
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction

from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

H100 = make_backend(GPUTarget("cuda", 90, 32))


def key_of(kernel, args, kwargs):
    """Returns what Triton keeps a compiled kernel under: types, alignment and constants."""
    signature = inspect.signature(kernel.fn)
    names = [name for name in kwargs if name not in signature.parameters]
    options = tuple(sorted((name, kwargs[name]) for name in names))
    bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    loose = kernel.kwargs.get("do_not_specialize") or ()
    key = [options]
    for name, value in bound.arguments.items():
        if signature.parameters[name].annotation in (tl.constexpr, "tl.constexpr"):
            key.append((name, value))
        else:
            found = native_specialize_impl(H100, value, False, name not in loose, True)
            key.append((name, str(found)))
    return tuple(key)


@pytest.fixture
def keys(monkeypatch):
    """Keys of each kernel's launches so far."""
    found = defaultdict(set)
    run = InterpretedFunction.run

    def recorded(self, *args, grid, warmup, **kwargs):
        found[self.__name__].add(key_of(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return found


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", ["full_attention"]), ("gemma3_text", ["sliding_attention", "full_attention"])],
    ids=["llama", "gemma3_text"],
)
def test_steps_of_other_sizes_compile_nothing(keys, family, layers):
    """Prompts, chunks and decode steps of 1 to 16 requests share the kernels of the first steps."""
    tiny = tiny_model(family, num_hidden_layers=len(layers), layer_types=list(layers))
    backend = TorchBackend(
        BackendOptions(num_threads=1, attention_backend="triton", torch_kernels="triton")
    )
    runner = PagedRunner(tiny.path, backend, num_blocks=512)
    ids = np.random.default_rng(1).integers(0, tiny.config["vocab_size"], 800)

    def run(num_requests, length):
        """Computes a chunk of `length` tokens of each request, then two decode steps."""
        requests = [runner.add(ids[: length + 2 + at]) for at in range(num_requests)]
        for start, stop in ((0, length), (length, length + 1), (length + 1, length + 2)):
            runner.step([(request, start, stop) for request in requests])

    run(2, 7)
    first = {name: set(found) for name, found in keys.items()}
    assert {"decode_kernel", "merge_kernel", "prefill_kernel"} <= first.keys()
    for num_requests, length in ((1, 17), (1, 270), (5, 3), (16, 2)):
        run(num_requests, length)
    new = {name: found - first.get(name, set()) for name, found in keys.items()}
    assert {name: found for name, found in new.items() if found} == {}
