"""LLM with images: chat and generate see the same, prefixes of the same image are found again, and
other images share nothing.
"""

from __future__ import annotations

from functools import cache

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import InvalidRequest
from octavo.api.outputs import RequestOutput
from octavo.engine.recording.recorder import read_log
from octavo.engine.recording.replay import Replay
from octavo.wiring.engine import build_executor
from tests.support.tiny_images import FAMILIES, picture, seeing_model
from tests.support.tiny_tokenizer import tiny_model_with_text

DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)


@cache
def llm(family: str, **options: object) -> LLM:
    given = {"max_model_len": 512, "max_num_seqs": 4, "threads": 2, "dtype": "float32", **options}
    return LLM(str(seeing_model(family).path), **given)


def conversation(seed: int, question: str = "What is it?") -> list[dict[str, object]]:
    parts = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def drawn(output: RequestOutput) -> tuple[list[int], float | None]:
    """Returns an answer's tokens and the bits of their logprobs."""
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


def answers(engine: LLM, *seeds: int) -> list[tuple[list[int], float | None]]:
    outputs = engine.chat([conversation(seed) for seed in seeds], DRAWN, use_tqdm=False)
    return [drawn(output) for output in outputs]


@pytest.mark.parametrize("family", [*FAMILIES, "mistral3", "smolvlm"])
def test_images_alone_batched_cached_and_chunked_give_the_same_tokens(family):
    engine = llm(family)
    engine.reset_prefix_cache()
    together = answers(engine, 0, 1, 0)
    assert together[0] == together[2] != together[1]
    engine.reset_prefix_cache()
    assert answers(engine, 1) == together[1:2]
    (again,) = engine.chat(conversation(1), DRAWN, use_tqdm=False)
    assert drawn(again) == together[1]
    assert again.num_cached_tokens > len(again.prompt_token_ids) - 17
    small = llm(family, max_num_batched_tokens=24, max_image_tokens=64)
    assert answers(small, 0, 1) == together[:2]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_reads_images_at_their_places(family):
    engine, model = llm(family), seeing_model(family)
    prompt = f"One {model.place} and another {model.place}?"
    images = [picture(0), picture(1)]
    outputs = engine.generate(
        [
            {"prompt": prompt, "multi_modal_data": {"image": images}},
            {"prompt": prompt, "multi_modal_data": {"image": images[::-1]}},
            {"prompt": f"One {model.place}", "multi_modal_data": {"image": images[0]}},
        ],
        DRAWN,
        use_tqdm=False,
    )
    assert drawn(outputs[0]) != drawn(outputs[1])
    assert outputs[0].num_cached_tokens <= outputs[1].num_cached_tokens <= 16


def test_samples_of_a_prompt_with_an_image_share_it():
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3, n=3, ignore_eos=True)
    (output,) = llm("qwen2_vl").chat(conversation(0), params, use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": [0]}}, "got int"),
        ({"prompt": "no place", "multi_modal_data": {"depth": [0]}}, "multi_modal_data: got"),
        ({"prompt": "no place", "multi_modal_data": {"video": [0]}}, "video: got int, expected"),
        (
            {"prompt": "no place", "multi_modal_data": {"image": picture(0)}},
            "placeholders for 0 images",
        ),
    ],
)
def test_images_that_have_no_place_are_refused(prompt, said):
    with pytest.raises(InvalidRequest, match=said):
        llm("qwen2_vl").generate(prompt, DRAWN, use_tqdm=False)


def test_a_model_of_text_refuses_images_by_name():
    engine = LLM(str(tiny_model_with_text()), max_model_len=256, threads=1)
    prompt = {"prompt": "a", "multi_modal_data": {"image": picture(0)}}
    with pytest.raises(InvalidRequest, match="accepts text only") as error:
        engine.generate(prompt, DRAWN, use_tqdm=False)
    assert "Gemma 3" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3", {"kv_cache_memory_bytes": "260KiB", "preemption_mode": "recompute"}),
        ("gemma3", {"spec_method": "ngram"}),
        ("qwen2_vl", {"kv_cache_memory_bytes": "170KiB", "preemption_mode": "swap"}),
        ("qwen2_5_vl", {"kv_cache_memory_bytes": "170KiB", "preemption_mode": "recompute"}),
        ("qwen2_5_vl", {"num_scheduler_steps": 8}),
        ("mistral3", {"kv_cache_memory_bytes": "170KiB", "preemption_mode": "recompute"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_answers_keep_their_bits_however_requests_are_scheduled(family, options):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)
    found = []
    for given in ({}, options):
        path = str(seeing_model(family).path)
        sizes = {"max_model_len": 256, "max_num_seqs": 4, "threads": 2, "dtype": "float32"}
        with LLM(path, **sizes, **given) as engine:
            outputs = engine.chat([conversation(seed) for seed in range(4)], params, use_tqdm=False)
            found.append([drawn(output) for output in outputs])
            num_preemptions = engine.get_metrics().num_preemptions
    assert found[0] == found[1]
    assert bool(num_preemptions) == ("preemption_mode" in options)


def test_a_recording_with_images_computes_the_same_again(tmp_path):
    path = str(tmp_path / "log")
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "threads": 2, "media_cache_tokens": 40}
    with LLM(str(seeing_model("qwen2_vl").path), **sizes, record=path) as engine:
        engine.chat([conversation(seed) for seed in (0, 1, 2, 0)], DRAWN, use_tqdm=False)
        engine.chat(conversation(0, "And now?"), DRAWN, use_tqdm=False)
    header, events = read_log(tmp_path / "log")
    executor = build_executor(header, model=None, report=lambda text: None)
    found = Replay(header, executor).run(events)
    executor.close()
    assert found.differences == [] and found.num_requests == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("qwen3_vl", "tensor_parallel_size"),
        ("qwen3_vl", "pipeline_parallel_size"),
        ("qwen3_5", "tensor_parallel_size"),
    ],
)
def test_two_ranks_answer_text(family, option):
    path, params = str(seeing_model(family).path), SamplingParams(temperature=0, max_tokens=6)
    tokens = []
    for more in ({}, {option: 2}):
        with LLM(path, dtype="float32", max_model_len=256, max_num_seqs=2, **more) as engine:
            (output,) = engine.generate({"prompt": "plain text"}, params, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
