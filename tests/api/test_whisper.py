"""Whisper through LLM.transcribe: the tokens are those of transformers, on tiny seeded weights; the
texts of spoken sentences are those of CTranslate2, on real ones.
"""

import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from octavo import LLM, VoiceActivity
from octavo.api.errors import InvalidRequest
from octavo.audio.log_mel import LogMel
from octavo.utils.progress import quiet
from tests.support.llm_tools import make_llm
from tests.support.tiny_models import tiny_model
from tests.support.tiny_whisper import (
    END,
    MULTILINGUAL,
    NO_TIMESTAMPS,
    START,
    SUPPRESSED,
    as_wav,
    noise,
    tiny_multilingual_whisper,
    tiny_whisper,
)
from tests.support.whisper_oracle import oracle_cut

NUM_TOKENS = 32
OPTIONS = {"skip_tokenizer_init": False, "max_model_len": 2 * NUM_TOKENS}


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("whisper")


def expected(tiny, samples):
    """Returns the tokens that transformers draws greedily."""
    config = tiny.model.config
    features = LogMel(config.num_mel_bins, 2 * config.max_source_positions).features(samples)
    inputs, ids = torch.tensor(features.T[None]), [START, NO_TIMESTAMPS]
    with torch.no_grad():
        encoded = tiny.model.model.encoder(inputs)
        for index in range(NUM_TOKENS):
            logits = tiny.model(
                encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids]), use_cache=False
            ).logits[0, -1]
            logits[SUPPRESSED] = -torch.inf
            if index == 0:
                logits[END] = -torch.inf
            ids.append(int(logits.argmax()))
            if ids[-1] == END:
                break
    return ids[2:]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_tokens_are_those_of_transformers(tiny, backend):
    sounds = [noise(seed, seconds) for seed, seconds in ((1, 1.5), (2, 2.0), (3, 0.1))]
    with make_llm(model_path=tiny_whisper(), backend=backend, **OPTIONS) as llm:
        texts = llm.transcribe([data for _, data in sounds], use_tqdm=False)
        found = [[segment.token_ids for segment in text.segments] for text in texts]
        alone = [llm.transcribe(data, use_tqdm=False)[0] for _, data in sounds]
    assert found == [[expected(tiny, samples)] for samples, _ in sounds]
    assert alone == texts


def test_a_long_sound_has_windows(tiny):
    samples, data = noise(4, 4.5)
    with make_llm(model_path=tiny_whisper(), backend="native", **OPTIONS) as llm:
        (text,) = llm.transcribe(data, use_tqdm=False)
        assert [(one.start_s, one.end_s) for one in text.segments] == [(0, 2), (2, 4), (4, 4.5)]
        assert text.segments[2].token_ids == expected(tiny, samples[64_000:])
        assert text.duration_s == 4.5 and text.srt().count(" --> ") == 3
        for bad, message in (
            ({"language": "de"}, "language: got 'de', expected en"),
            ({"task": "translate"}, "supports English only"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                llm.transcribe(data, use_tqdm=False, **bad)
        with pytest.raises(InvalidRequest, match="got a string, but the model transcribes audio"):
            llm.generate("Hello", use_tqdm=False)


def heard(tiny, samples):
    """Returns what gives the next logits of transformers, by the tokens so far."""
    config = tiny.model.config
    features = LogMel(config.num_mel_bins, 2 * config.max_source_positions).features(samples)
    with torch.no_grad():
        encoded = tiny.model.model.encoder(torch.tensor(features.T[None]))

    def logits(ids):
        with torch.no_grad():
            return tiny.model(
                encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids]), use_cache=False
            ).logits[:, -1]

    return logits


def expected_of(tiny, samples, task, language, *, timestamps, before=()):
    """Returns the language and the tokens that transformers draws greedily with its processors,
    behind the tokens of a text `before`.
    """
    known, logits = MULTILINGUAL, heard(tiny, samples)
    start, end = known["decoder_start_token_id"], known["eos_token_id"]
    codes = known["lang_to_id"]
    if language is None:
        first = logits([start])[0]
        language = max(codes, key=lambda code: first[codes[code]])[2:-2]
    ids = [*before, start, codes[f"<|{language}|>"], known["task_to_id"][task]]
    rules = [
        SuppressTokensAtBeginLogitsProcessor([8, end], len(ids) + (not timestamps)),
        SuppressTokensLogitsProcessor(known["suppress_tokens"]),
    ]
    if timestamps:
        rules.append(WhisperTimeStampLogitsProcessor(SimpleNamespace(**known), len(ids)))
    else:
        ids.append(known["no_timestamps_token_id"])
    first = len(ids)
    for _ in range(min(NUM_TOKENS, 2 * NUM_TOKENS - first)):
        scores = logits(ids)
        for rule in rules:
            scores = rule(torch.tensor([ids]), scores)
        ids.append(int(scores.argmax()))
        if ids[-1] == end:
            break
    return language, ids[first:]


ASKED = [
    {"language": "de", "task": "translate"},
    {"language": None, "task": "transcribe"},
    {"language": None, "task": "transcribe", "timestamps": True},
    {"language": "en", "task": "translate", "timestamps": True},
]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(map(str, asked.values())))
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_languages_tasks_and_times_are_those_of_transformers(tiny, backend, asked):
    """The last token, which ends the text, is not among a segment's."""
    path = tiny_multilingual_whisper()
    sounds = [noise(seed, seconds) for seed, seconds in ((1, 1.5), (2, 2.0), (3, 0.4), (5, 1.0))]
    timestamps = asked.get("timestamps", False)
    with make_llm(model_path=path, backend=backend, **OPTIONS) as llm:
        texts = llm.transcribe([data for _, data in sounds], use_tqdm=False, **asked)
    for (samples, _), text in zip(sounds, texts, strict=True):
        task, language = asked["task"], asked["language"]
        wanted = expected_of(tiny, samples, task, language, timestamps=timestamps)
        found = [token for segment in text.segments for token in segment.token_ids]
        assert text.language == wanted[0]
        if not timestamps:
            assert found == wanted[1]
            continue
        times = [(one.start_s, one.end_s, one.token_ids) for one in text.segments]
        assert times == expected_segments(tiny, samples, task, text.language)


def expected_segments(tiny, samples, task="transcribe", language="en", *, before=()):
    """Returns the segments of a sound by transformers' way from window to window."""
    first, end = MULTILINGUAL["no_timestamps_token_id"] + 1, MULTILINGUAL["eos_token_id"]
    found, seek, num_frames = [], 0, len(samples) // 160
    while seek < num_frames:
        size = min(200, num_frames - seek)
        _, drawn = expected_of(
            tiny,
            samples[160 * seek : 160 * (seek + 200)],
            task,
            language,
            timestamps=True,
            before=() if seek else before,
        )
        tokens = [token for token in drawn if token != end]
        cut = oracle_cut(tokens, first=first, frames=size, start_s=seek * 0.01)
        for start_s, end_s, words in cut.segments:
            end_s = min(end_s, (seek + size) * 0.01)
            if words and end_s > start_s:
                found.append((round(start_s, 3), round(end_s, 3), words))
        seek += cut.num_frames
    return found


@pytest.mark.parametrize("seed", [4, 6])
def test_windows_of_a_long_sound_move_by_its_timestamps(tiny, seed):
    samples, data = noise(seed, 7.3)
    with make_llm(model_path=tiny_multilingual_whisper(), backend="native", **OPTIONS) as llm:
        (text,) = llm.transcribe(data, language="en", timestamps=True, use_tqdm=False)
        beside = llm.transcribe(
            [noise(1)[1], data], language="en", timestamps=True, use_tqdm=False
        )[1]
    found = [(one.start_s, one.end_s, one.token_ids) for one in text.segments]
    assert found == expected_segments(tiny, samples)
    assert beside == text
    assert len({one.seek_s for one in text.segments} - {0.0, 2.0, 4.0, 6.0}) > 0


@pytest.mark.parametrize("timestamps", [False, True])
def test_speech_activity_skips_silence(tiny, timestamps):
    """Parts with speech are windows of their own; those with timestamps move within a part."""
    samples, _ = noise(4, 1.0)
    longer, _ = noise(6, 3.1)
    silence = np.zeros(32_000, np.float32)
    sound = np.concatenate([silence, samples, silence, longer, silence])
    parts = [(1.7, 3.2), (4.7, 8.3)]
    how = {"language": "en", "use_tqdm": False}
    with make_llm(model_path=tiny_multilingual_whisper(), backend="native", **OPTIONS) as llm:
        (text,) = llm.transcribe(
            as_wav(sound), timestamps=timestamps, chunking=VoiceActivity(), **how
        )
        (empty,) = llm.transcribe(as_wav(silence), chunking=VoiceActivity(), **how)
        with pytest.raises(InvalidRequest, match="threshold: got 2, expected a number from 0 to 1"):
            llm.transcribe(as_wav(silence), chunking=VoiceActivity(threshold=2), **how)
    assert (empty.text, empty.segments) == ("", [])
    assert text.duration_s == pytest.approx(10.1)
    for segment in text.segments:
        assert any(
            start - 0.1 <= segment.start_s < segment.end_s <= end + 0.1 for start, end in parts
        )
    starts = {segment.seek_s for segment in text.segments}
    assert min(starts) == pytest.approx(1.7, abs=0.1) and max(starts) > 4.5
    if not timestamps:
        assert len(text.segments) == 3  # the second part is longer than a window of two seconds


def test_a_text_goes_before_the_first_window(tiny):
    samples, data = noise(4, 3.1)
    with make_llm(model_path=tiny_multilingual_whisper(), backend="native", **OPTIONS) as llm:
        ids = llm.get_tokenizer().encode(" a b", add_special_tokens=False)
        (text,) = llm.transcribe(
            data, language="en", timestamps=True, prompt="a b ", use_tqdm=False
        )
    found = [(one.start_s, one.end_s, one.token_ids) for one in text.segments]
    before = (MULTILINGUAL["prev_sot_token_id"], *ids)
    assert found == expected_segments(tiny, samples, before=before)
    with (
        make_llm(model_path=tiny_whisper(), backend="native", **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="prompt: the model does not support a prompt"),
    ):
        llm.transcribe(data, prompt="a", use_tqdm=False)


def test_a_model_without_times_refuses_them():
    with (
        make_llm(
            model_path=tiny_whisper(), backend="torch", batch_invariant=False, **OPTIONS
        ) as llm,
        pytest.raises(InvalidRequest, match="timestamps: got true, but this model"),
    ):
        llm.transcribe(noise(1)[1], timestamps=True, use_tqdm=False)


def test_a_model_of_text_hears_nothing():
    with make_llm() as llm, pytest.raises(InvalidRequest, match="accepts text, not audio"):
        llm.transcribe(b"")


SENTENCES = {
    "The quick brown fox jumps over the lazy dog.": "The quick roundfark stump, so the lazy dog.",
    "Light bends when it passes from air into glass.": (
        "light bends when it passes from air into glass."
    ),
    "Please close the window before you leave the house.": (
        "Please close the window before you leave the house."
    ),
    "My brother bought three apples and a loaf of bread.": (
        "My brother bought three apples and a loaf of bread."
    ),
    "The train to London leaves at half past seven.": (
        "The train to London leaves at half past heaven."
    ),
    "She sells sea shells by the sea shore.": "She tells each hell by the sea shore.",
    "Water boils at one hundred degrees.": "water boil at 100 degrees.",
    "We will meet again on Monday morning.": "We will meet again on Monday morning.",
    "The children are playing in the garden.": "The children are playing in the garden.",
    "He opened the old book and began to read.": "He opened the old book and began to read.",
}
"""Sentences, and the texts that CTranslate2 4.8.5 makes of espeak-ng's speech in float32."""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng, which speaks")
def test_texts_of_spoken_sentences_are_those_of_ctranslate2(tmp_path):
    files = []
    for index, sentence in enumerate(SENTENCES):
        files.append(tmp_path / f"{index}.wav")
        command = ["espeak-ng", "-v", "en", "-s", "140", "-w", str(files[-1]), sentence]
        subprocess.run(command, check=True)
    with LLM("whisper-tiny.en", report=quiet, dtype="float32") as llm:
        texts = llm.transcribe(files, use_tqdm=False)
        assert [text.text for text in texts] == list(SENTENCES.values())
