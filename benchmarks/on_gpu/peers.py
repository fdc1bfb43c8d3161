"""transformers' continuous batching over the same shape on the same device, with the requests of
the section `engine`.
"""

from __future__ import annotations

import importlib.util
import random
import time
from typing import Any

import torch

from benchmarks.on_gpu.engine import loads_of
from benchmarks.on_gpu.settings import Emit, Settings
from benchmarks.on_gpu.shapes import Shape, shape_of


def section(settings: Settings, emit: Emit) -> None:
    if importlib.util.find_spec("transformers") is None:
        emit({"note": "transformers is not installed: nothing is compared with it"})
        return
    if settings.device == "cpu":
        emit({"note": "transformers' continuous batching is for GPUs: nothing is compared with it"})
        return
    from transformers import GenerationConfig

    shape, (count, prompt, output) = shape_of(tiny=settings.tiny), loads_of(settings).offered
    model = _model(shape, settings)
    draw = random.Random(7)
    prompts = [[draw.randrange(10, shape.vocab) for _ in range(prompt)] for _ in range(count)]
    how = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rates = [_rate(model, prompts, how, count * output) for _ in range(2)]
    emit(
        {
            "offered": "transformers",
            "requests": [count, prompt, output],
            "tokens_per_s": round(max(rates), 1),
        }
    )


def _rate(model: Any, prompts: list[list[int]], how: Any, wanted: int) -> float:
    """Returns tokens per second. The first run warms up what is kept between the two."""
    began = time.perf_counter()
    made = model.generate_batch(inputs=prompts, generation_config=how, persistent_manager=True)
    taken = time.perf_counter() - began
    num_tokens = sum(len(result.generated_tokens) for result in made.values())
    if num_tokens != wanted:
        raise RuntimeError(f"{num_tokens} tokens came out, {wanted} were asked for")
    return num_tokens / taken


def _model(shape: Shape, settings: Settings) -> Any:
    """Returns a model of random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            name: value
            for name, value in shape.config.items()
            if name not in ("architectures", "model_type", "dtype")
        }
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(settings.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
