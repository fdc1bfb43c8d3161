"""CTranslate2's texts of speech in int8, all files in one batch; features by transformers'
extractor. Needs ctranslate2, transformers and NumPy.
"""

import wave
from pathlib import Path

import ctranslate2
import numpy as np
import tokenizers
from speech_work import arguments, measure
from transformers import WhisperFeatureExtractor

RATE = 16_000

options, files = arguments()
folder = Path(options["model"])
model = ctranslate2.models.Whisper(
    str(folder), compute_type="int8", intra_threads=options["threads"], inter_threads=1
)
extractor = WhisperFeatureExtractor(feature_size=80)
tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
prompt = [tokenizer.token_to_id(text) for text in ("<|startoftranscript|>", "<|notimestamps|>")]


def samples_of(path: str) -> np.ndarray:
    with wave.open(path) as file:
        rate = file.getframerate()
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768.0
    places = np.arange(0, len(data), rate / RATE)
    return np.interp(places, np.arange(len(data)), data).astype(np.float32)


def hear(some: list[str]) -> list[str]:
    sounds = [samples_of(path) for path in some]
    features = extractor(sounds, sampling_rate=RATE, return_tensors="np")["input_features"]
    found = model.generate(
        ctranslate2.StorageView.from_array(features.astype(np.float32)),
        [prompt] * len(some),
        beam_size=1,
        max_length=224,
    )
    return [tokenizer.decode(each.sequences_ids[0]).strip() for each in found]


measure(hear, files)
