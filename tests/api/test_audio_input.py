"""LLM and the server with audio in prompts: chat and generate hear the same, prefixes of the same
audio are found again, and what cannot be read is refused.
"""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

import numpy as np
import pytest
import soundfile

from octavo import LLM, SamplingParams
from octavo.api.errors import InvalidRequest
from octavo.api.outputs import RequestOutput
from tests.support.tiny_audio import PLACES, hearing_model, sound
from tests.support.tiny_images import picture, seeing_model
from tests.support.tiny_tokenizer import tiny_model_with_text

DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)


@cache
def llm(family: str, **options: object) -> LLM:
    given = {"max_model_len": 256, "max_num_seqs": 4, "threads": 2, "dtype": "float32", **options}
    return LLM(str(hearing_model(family).path), **given)


def encoded(samples: np.ndarray, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return file.getvalue()


def part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}


def conversation(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [one, {"type": "text", "text": "What is said?"}]}]


def drawn(output: RequestOutput) -> tuple[list[int], float | None]:
    """Returns an answer's tokens and the bits of their logprobs."""
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


@pytest.mark.parametrize("family", PLACES)
def test_audio_alone_batched_cached_and_chunked_give_the_same_tokens(family):
    engine = llm(family)
    engine.reset_prefix_cache()
    chats = [conversation(part(encoded(sound(seed)))) for seed in (0, 1, 0)]
    together = [drawn(one) for one in engine.chat(chats, DRAWN, use_tqdm=False)]
    assert together[0] == together[2] != together[1]
    (again,) = engine.chat(chats[1], DRAWN, use_tqdm=False)
    assert drawn(again) == together[1]
    assert again.num_cached_tokens > len(again.prompt_token_ids) - 17
    room = "300KiB" if family == "gemma4:audio" else "140KiB"
    small = llm(family, max_num_batched_tokens=16, kv_cache_memory_bytes=room)
    assert [drawn(one) for one in small.chat(chats, DRAWN, use_tqdm=False)] == together


@pytest.mark.parametrize("family", PLACES)
def test_generate_hears_each_form_of_an_audio(family, tmp_path):
    samples, place = sound(0), PLACES[family]
    file = tmp_path / "sound.wav"
    file.write_bytes(encoded(samples))
    data = file.read_bytes()
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    forms = [samples, (samples, 16_000), data, file, url]
    prompts = [
        {"prompt": f"{place} Say it.", "multi_modal_data": {"audio": form}} for form in forms
    ]
    heard = {str(drawn(one)) for one in llm(family).generate(prompts, DRAWN, use_tqdm=False)}
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        (0, "audio: got int, expected bytes of a file"),
        (
            np.zeros((2, 9), np.float32),
            r"audio: got an array \(2, 9\) of float32, expected samples",
        ),
        (b"RIFF", "audio: it cannot be read"),
        (encoded(sound(0, 0.5)), "audio: it is 0 s long; expected at most 0 s"),
        (sound(0, 0.5), "audio: got 0.5 s, expected at most 0 s"),
        (sound(0, 0.02), "audio: got 0.020 s, expected at least 0.04 s"),
        ([sound(0)] * 9, "audio: got 9 audio, expected at most 8 per prompt"),
        ([sound(0)] * 2, "prompt: has placeholders for 1 audio, got 2"),
    ],
)
def test_audio_that_cannot_be_read_is_refused(audio, said):
    prompt = {"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": audio}}
    with pytest.raises(InvalidRequest, match=said):
        llm("qwen2_audio").generate(prompt, DRAWN, use_tqdm=False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "expected an object with data"),
        (part(b"x", "aac"), "format: got 'aac', expected wav, mp3, flac, ogg"),
        ({"type": "image", "image": picture(0)}, "the model reads audio only"),
        ({"type": "audio"}, "got audio part without audio, expected a data URL"),
    ],
)
def test_parts_that_are_no_audio_are_refused(content, said):
    with pytest.raises(InvalidRequest, match=said):
        llm("qwen2_audio").chat(conversation(content), DRAWN, use_tqdm=False)


def test_models_without_ears_refuse_audio_by_name():
    seeing = LLM(str(seeing_model("qwen2_vl").path), max_model_len=256, threads=1)
    reading = LLM(str(tiny_model_with_text()), max_model_len=256, threads=1)
    for engine, said in ((seeing, "reads images only"), (reading, "accepts text only")):
        prompt = {"prompt": "a", "multi_modal_data": {"audio": sound(0)}}
        with pytest.raises(InvalidRequest, match=said) as error:
            engine.generate(prompt, DRAWN, use_tqdm=False)
        assert "Qwen2-Audio" in (error.value.hint or "")
