"""Small engines over tiny models, and what is compared of their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from octavo.engine.clients.in_process import InProcessClient
from octavo.engine.core import EngineCore
from tests.support.backend_choice import chosen_backend
from tests.support.tiny_models import tiny_model


def make_llm(family: str = "llama", *, model_path: Path | None = None, **options) -> LLM:
    """Makes a small engine: token-id prompts only, contexts of 256 tokens, on the reference
    backend, unless `options` say otherwise; on torch it is batch-invariant.
    """
    small = small_options(family, model_path=model_path) | options
    small["batch_invariant"] = options.get("batch_invariant", small["backend"] == "torch")
    return LLM(**{"report": lambda text: None} | small)


def make_async(*, in_process: bool = True, **options: Any) -> AsyncLLM:
    """Makes a small engine for streams; its core is in this process, or in one of its own."""
    return AsyncLLM.from_options(in_process=in_process, **small_options() | options)


async def final(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str | None = None
) -> RequestOutput:
    """Reads a request to its end and returns its final output, which must be the only one."""
    outputs = [output async for output in llm.generate(prompt, params, request_id)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def small_options(family: str = "llama", *, model_path: Path | None = None) -> dict[str, Any]:
    return {
        "model": str(model_path or tiny_model(family).path),
        "backend": chosen_backend("reference"),
        "batch_invariant": chosen_backend("reference") == "torch",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": "64MiB",
        "threads": 1,
        "generation_config": "vllm",
    }


def prompts_of(*lengths: int) -> list[list[int]]:
    """Makes prompts of ids below 240, all different."""
    return [
        [(31 * length + 7 * i * i + 3 * i) % 237 + 3 for i in range(length)] for length in lengths
    ]


LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=8, ignore_eos=True, logprobs=2
)
PENALISED = SamplingParams(
    temperature=0.7,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    seed=5,
    max_tokens=8,
    ignore_eos=True,
    logprobs=2,
)


def fingerprint(output: RequestOutput) -> list:
    """Returns token ids and logprobs, to be compared bitwise."""
    assert output.finished and output.error is None, output.error
    return [
        (
            sample.index,
            tuple(sample.token_ids),
            sample.finish_reason,
            None
            if sample.logprobs is None
            else tuple(
                tuple((t, p.logprob, p.rank) for t, p in step.items()) for step in sample.logprobs
            ),
        )
        for sample in output.outputs
    ] + [
        None
        if output.prompt_logprobs is None
        else tuple(
            None if step is None else tuple((t, p.logprob, p.rank) for t, p in step.items())
            for step in output.prompt_logprobs
        )
    ]


def alone(llm: LLM, prompt: list[int], params: SamplingParams) -> list:
    """Computes a prompt by itself, with nothing to be found in the cache."""
    assert llm.reset_prefix_cache()
    return fingerprint(llm.generate(prompt, params)[0])


def core_of(llm: LLM) -> EngineCore:
    """Returns the core of an engine, which runs in this process."""
    client = llm.frontend.client
    if not isinstance(client, InProcessClient):
        raise TypeError(f"an LLM's core is in its process, got a {type(client).__name__}")
    return client.core
