"""Whole engines over tiny models: greedy tokens against transformers, captured decode steps against
uncaptured ones, and bits that do not depend on the batch.

Tokens of different arithmetic are compared up to the first place at which transformers' best two
logits lie within 1e-3.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.on_gpu.report import checked
from benchmarks.on_gpu.settings import Emit, Settings, attempt

GAP = 1e-3
FAMILIES = ("qwen2_moe", "gpt_oss", "deepseek_v3", "llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
"""Families, those with experts first."""
LENGTHS = (5, 40, 130, 17)
NUM_TOKENS = 24


def section(settings: Settings, emit: Emit) -> None:
    if _without_transformers(emit):
        return
    for family in ("llama",) if settings.tiny else FAMILIES:
        attempt(emit, family, partial(_greedy, family, settings, emit))


def invariance(settings: Settings, emit: Emit) -> None:
    if _without_transformers(emit):
        return
    for family in ("llama",) if settings.tiny else ("llama", "gemma3_text", "qwen2_moe", "gpt_oss"):
        for dtype in ("float32",) if settings.tiny else ("float32", "bfloat16"):
            attempt(emit, f"{family}, {dtype}", partial(_invariant, family, dtype, settings, emit))


def _without_transformers(emit: Emit) -> bool:
    """Reports that transformers is missing, which makes the tiny models and the tokens to compare
    with.
    """
    missing = importlib.util.find_spec("transformers") is None
    if missing:
        emit({"note": "transformers is not installed: no tokens are compared"})
    return missing


def _greedy(family: str, settings: Settings, emit: Emit) -> None:
    from tests.support.tiny_models import tiny_model

    model = tiny_model(family).model
    prompts = _prompts(settings)
    captured, eager = (
        _tokens(_engine(family, settings, enforce_eager=flag), prompts, settings)
        for flag in (False, True)
    )
    wanted = [_transformers_tokens(model, prompt, _num_tokens(settings)) for prompt in prompts]
    for name, found in (("as usual", captured), ("with nothing captured", eager)):
        wrong = [
            at
            for at, (mine, (ids, clear)) in enumerate(zip(found, wanted, strict=True))
            if mine[:clear] != ids[:clear]
        ]
        detail = f"{sum(clear for _, clear in wanted)} tokens, other in prompts {wrong}"
        emit(
            checked(
                f"{family}: greedy tokens are transformers', {name}", ok=not wrong, detail=detail
            )
        )


def _invariant(family: str, dtype: str, settings: Settings, emit: Emit) -> None:
    """Compares tokens and logprobs bit for bit: alone, together, in chunks of 16 tokens."""
    prompts = _prompts(settings)
    usual = {"batch_invariant": True, "dtype": dtype}
    with _engine(family, settings, **usual) as llm:
        together = [_bits(output) for output in _generated(llm, prompts, settings)]
        alone = [_bits(_generated(llm, [prompt], settings)[0]) for prompt in prompts]
    with _engine(family, settings, max_num_batched_tokens=16, **usual) as llm:
        chunked = [_bits(output) for output in _generated(llm, prompts, settings)]
    for name, found in (("together", together), ("in chunks", chunked)):
        wrong = [at for at, pair in enumerate(zip(found, alone, strict=True)) if pair[0] != pair[1]]
        emit(
            checked(
                f"{family}, {dtype}: the same bits {name} as alone",
                ok=not wrong,
                detail=f"other in prompts {wrong}",
            )
        )


def _prompts(settings: Settings) -> list[list[int]]:
    from tests.support.llm_tools import prompts_of

    return prompts_of(*(LENGTHS[:2] if settings.tiny else LENGTHS))


def _num_tokens(settings: Settings) -> int:
    return 6 if settings.tiny else NUM_TOKENS


def _engine(family: str, settings: Settings, **options: Any) -> Any:
    from tests.support.llm_tools import make_llm

    cpu = {"async_scheduling": "on"} if settings.device == "cpu" else {"threads": None}
    usual = {
        "backend": "torch",
        "device": settings.device,
        "batch_invariant": False,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }
    return make_llm(family, **(usual | cpu | options))


def _generated(llm: Any, prompts: Sequence[list[int]], settings: Settings) -> list[Any]:
    from octavo import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=_num_tokens(settings), ignore_eos=True, logprobs=1
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    faults = [output.error for output in outputs if output.error is not None]
    if faults:
        raise RuntimeError(
            f"{len(faults)} of {len(outputs)} requests failed, the first with: {faults[0]}"
        )
    return list(outputs)


def _tokens(llm: Any, prompts: Sequence[list[int]], settings: Settings) -> list[list[int]]:
    with llm:
        return [list(output.outputs[0].token_ids) for output in _generated(llm, prompts, settings)]


def _bits(output: Any) -> Any:
    from tests.support.llm_tools import fingerprint

    return fingerprint(output)


def _transformers_tokens(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Returns greedy tokens, computed in fp32 on the CPU, and how many come before the first whose
    best two logits are too close.
    """
    import torch

    ids, clear = list(prompt), None
    with torch.inference_mode():
        for at in range(num_tokens):
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            if clear is None and float(best.values[0] - best.values[1]) < GAP:
                clear = at
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :], num_tokens if clear is None else clear
