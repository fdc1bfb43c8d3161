"""Gemma 3 270M from its GGUF (Q4_K, Q6_K; windows and full layers) on native: fp32 equals
transformers', packed stays close.
"""

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.open import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, in a small village,"]


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    """Loads transformers' Gemma 3 with the GGUF's weights, dequantised, in fp32."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    checkpoint = open_checkpoint(resolve("gemma3-270m"))
    network = Gemma3ForCausalLM(Gemma3TextConfig(**checkpoint.config)).eval()
    weights = {
        name: torch.from_numpy(checkpoint.tensor(name).dequantize().copy())
        for name in checkpoint.names()
    }
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    network.tie_weights()
    return network


def logprobs_of(oracle: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def test_greedy_tokens_equal_transformers(oracle: torch.nn.Module) -> None:
    """Each of 48 greedy tokens in fp32 is the best of transformers' logits after those before it,
    and the text makes sense.
    """
    with LLM(
        "gemma3-270m",
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes="256MiB",
        report=lambda text: None,
    ) as llm:
        outputs = llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        )
    for output in outputs:
        made, first = output.outputs[0].token_ids, len(output.prompt_token_ids) - 1
        assert (
            made
            == logprobs_of(oracle, output.prompt_token_ids + made)[first:-1].argmax(-1).tolist()
        ), output.prompt
    assert "largest city in France" in outputs[0].outputs[0].text


def test_packed_logprobs_stay_close_beyond_the_window(oracle: torch.nn.Module) -> None:
    """Logprobs as packed stay beside transformers' in fp32 on a text longer than the windowed
    layers' 512 tokens.
    """
    with LLM(
        "gemma3-270m", max_model_len=1024, kv_cache_memory_bytes="256MiB", report=lambda text: None
    ) as llm:
        text = " ".join(
            f"The number {number} is followed by {number + 1}, and so on." for number in range(70)
        )
        token_ids = llm.get_tokenizer().encode(text)[:900]
        output = llm.generate(
            {"prompt_token_ids": token_ids},
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        )[0]
    assert len(token_ids) > 600 and output.prompt_logprobs is not None
    found = np.array(
        [
            entry[token_id].logprob
            for token_id, entry in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )
    expected = (
        logprobs_of(oracle, token_ids)[:-1]
        .gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        .numpy()
    )
    assert abs(found.mean() - expected.mean()) < 0.02
    assert np.percentile(abs(found - expected), 90) < 0.3
