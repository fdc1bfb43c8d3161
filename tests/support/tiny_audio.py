"""Tiny seeded models whose decoders read audio, with tokenizers that know their audio tokens, and
sounds to play them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.tiny_other_shapes import AUDIO_TEXT, IMAGE_ID
from tests.support.tiny_tokenizer import save_tiny_tokenizer

WORDS = {
    "qwen2_audio": ("<|AUDIO|>",),
    "voxtral": ("[AUDIO]",),
    "gemma4:audio": (
        *("<|audio|>", "<|audio>", "<audio|>"),
        *("<|image|>", "<|image>", "<image|>", "<|video|>"),
    ),
}
"""Special tokens of each family from IMAGE_ID on."""
PLACES = {family: words[0] for family, words in WORDS.items()}
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'audio' %}AUDIO"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


@cache
def hearing_model(family: str) -> TinyModel:
    """Returns the tiny model of a family, with its tokenizer."""
    tiny = tiny_model(family.partition(":")[0], **AUDIO_TEXT[family])
    save_tiny_tokenizer(tiny.path)
    file = str(tiny.path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    missing = IMAGE_ID - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused{index}>" for index in range(missing)])
    words = [AddedToken(word, special=True, normalized=False) for word in WORDS[family]]
    tokenizer.add_special_tokens(words)
    tokenizer.save(file)
    settings_file = Path(tiny.path / "tokenizer_config.json")
    settings = json.loads(settings_file.read_text())
    settings["chat_template"] = TEMPLATE.replace("AUDIO", PLACES[family])
    settings_file.write_text(json.dumps(settings))
    return tiny


def sound(seed: int, seconds: float = 0.3) -> NDArray[np.float32]:
    """Returns seeded tones with noise, samples at 16 kHz."""
    generator = np.random.default_rng(seed)
    at = np.arange(round(seconds * 16_000)) / 16_000
    tones = sum(np.sin(2 * np.pi * hz * at) for hz in generator.uniform(200, 3000, 3))
    noise = generator.standard_normal(len(at))
    return ((tones + 0.3 * noise) / 5).astype(np.float32)
