"""The real model's quality on the native backend: fp32 equals transformers, every format stays
within its bound.

Perplexity is over Newton's Opticks (tests/data); the expected fp32 value is transformers' on the
dequantised weights.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.batch import StepBatch
from octavo.executor.native.backend import NativeBackend
from octavo.models.registry import build_programs

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]
DATA = Path(__file__).parent.parent / "data"
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Light is"]


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    """Loads transformers' Llama with the GGUF's weights, dequantised, in fp32."""
    from benchmarks.kv_formats import load_network

    return load_network()


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(oracle: torch.nn.Module) -> None:
    """Each of 48 greedy tokens of each prompt, fp32 on both sides, is the best of transformers'
    logits after those before it.
    """
    with LLM("smollm2", dtype="float32", max_model_len=256, report=lambda text: None) as llm:
        outputs = llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        )
    for output in outputs:
        made = output.outputs[0].token_ids
        assert len(made) == 48
        with torch.inference_mode():
            logits = oracle(torch.tensor([output.prompt_token_ids + made])).logits[0]
        first = len(output.prompt_token_ids) - 1
        assert made == logits[first:-1].argmax(-1).tolist(), output.prompt


def perplexity_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "perplexity", Path(__file__).parents[2] / "benchmarks" / "perplexity.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = [
    pytest.param({"dtype": "float32"}, 0.01, id="fp32"),
    pytest.param({}, 1.0, id="as packed"),
    pytest.param({"quantization": "int8"}, 1.0, id="int8"),
    pytest.param({"quantization": "int4"}, 6.0, id="int4"),
    pytest.param({"dtype": "bfloat16"}, 1.0, id="bf16"),
    pytest.param({"dtype": "float32", "kv_cache_dtype": "int8"}, 0.5, id="int8 KV"),
    pytest.param({"dtype": "float32", "kv_cache_dtype": "k8v4"}, 1.0, id="k8v4 KV"),
]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("options", "bound_percent"), CASES)
def test_perplexity_of_a_window(options: dict[str, str], bound_percent: float) -> None:
    """The perplexity of a window is within its bound, widened by half a percent, for it is a small
    sample of the text.
    """
    found = perplexity_script().measure(1, model="smollm2", **options)
    slack = 0.0 if options.get("dtype") == "float32" else 0.5
    assert abs(found["rise_percent"]) <= bound_percent + slack, found


@pytest.mark.slow
@pytest.mark.parametrize(("options", "bound_percent"), CASES)
def test_perplexity(options: dict[str, str], bound_percent: float) -> None:
    found = perplexity_script().measure(model="smollm2", **options)
    assert found["rise_percent"] <= bound_percent, found
    if options.get("dtype") == "float32":
        assert found["rise_percent"] >= -bound_percent, found


@pytest.mark.slow
def test_logits_cosine_as_packed() -> None:
    """The 5th percentile, over all 20,480 positions, of the cosine between the packed model's
    logits and fp32's is above 0.995.
    """
    with LLM("smollm2", report=lambda text: None, max_model_len=256) as llm:
        token_ids = llm.get_tokenizer().encode(
            (DATA / "opticks.txt").read_text(encoding="utf-8"), add_special_tokens=False
        )
    cosines = np.concatenate(
        [
            _cosines(np.array(token_ids[start : start + 1024], np.int32))
            for start in range(0, 20480, 1024)
        ]
    )
    assert np.percentile(cosines, 5) > 0.995


def _cosines(ids: np.ndarray) -> np.ndarray:
    exact, packed = (_logits(ids, dtype) for dtype in ("float32", "auto"))
    return (exact * packed).sum(1) / (
        np.linalg.norm(exact, axis=1) * np.linalg.norm(packed, axis=1)
    )


_RUNNABLES: dict[str, tuple] = {}


def _logits(ids: np.ndarray, dtype: str) -> np.ndarray:
    """Computes the logits `[T, V]` of one window, straight from the backend."""
    if dtype not in _RUNNABLES:
        checkpoint = open_checkpoint(resolve("smollm2"))
        program = build_programs(checkpoint.config)["decoder"]
        backend = NativeBackend(BackendOptions(dtype=dtype, num_threads=2, max_tokens=1024))
        runnable = backend.prepare_program(
            program, WeightReader(checkpoint, dtype, None, program).load
        )
        _RUNNABLES[dtype] = runnable, backend.allocate(runnable.kv_layouts, [64])
    runnable, kv = _RUNNABLES[dtype]
    rows = np.arange(len(ids), dtype=np.int32)
    batch = StepBatch(
        token_ids=ids,
        key_indices=rows,
        positions=rows[None],
        query_starts=np.array([0, len(ids)], np.int32),
        context_lens=np.array([[len(ids)]], np.int32),
        slots=rows[None],
        block_tables=np.arange(64, dtype=np.int32)[None, None],
        sample_rows=rows,
    )
    return runnable.run(batch, kv).arrays["logits"]
