"""Tiny seeded models that read images, with tokenizers that know their image tokens, and images to
show them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from tokenizers import AddedToken, Tokenizer

from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.tiny_other_shapes import CONFIGS, IMAGE_ID
from tests.support.tiny_tokenizer import save_tiny_tokenizer

FAMILIES = tuple(CONFIGS)

QWEN = tuple(family for family in FAMILIES if family.startswith("qwen"))
WORDS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    **dict.fromkeys(QWEN, ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")),
}
"""Texts of the tokens of an image's rows, of its beginning, of its end and of a video's rows."""

COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
QWEN_RULES = {"min_pixels": 16 * 16, "max_pixels": 48 * 48, "patch_size": 4, **COLOURS}
RULES: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 32, "width": 32}, "resample": 2}
    | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    **dict.fromkeys(QWEN, QWEN_RULES),
}
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


@dataclass(frozen=True)
class SeeingModel:
    """A tiny model that reads images, and the text that stands for one in its prompts."""

    family: str
    tiny: TinyModel
    place: str

    @property
    def path(self) -> Path:
        return self.tiny.path


@cache
def seeing_model(family: str) -> SeeingModel:
    """Returns the tiny model of a family, with its tokenizer and preprocessor_config.json."""
    tiny = tiny_model(family, **CONFIGS[family])
    save_tiny_tokenizer(tiny.path)
    file = str(tiny.path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    missing = IMAGE_ID - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused{index}>" for index in range(missing)])
    words = [AddedToken(word, special=True, normalized=False) for word in WORDS[family]]
    tokenizer.add_special_tokens(words)
    tokenizer.save(file)
    image, begin, end = WORDS[family][:3]
    place = begin if family == "gemma3" else f"{begin}{image}{end}"
    settings_file = tiny.path / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    video = place.replace(image, "<|video_pad|>")
    settings["chat_template"] = TEMPLATE.replace("IMAGE", place).replace("VIDEO", video)
    settings_file.write_text(json.dumps(settings))
    (tiny.path / "preprocessor_config.json").write_text(json.dumps(RULES[family]))
    if family.startswith("qwen3"):
        rules = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "fps": 2}
        (tiny.path / "video_preprocessor_config.json").write_text(json.dumps(rules))
    return SeeingModel(family, tiny, place)


def picture(seed: int, width: int = 45, height: int = 37) -> PIL.Image.Image:
    """Returns a seeded image of soft shapes."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.BICUBIC)


def processor_of(family: str) -> Any:
    """Returns transformers' image processor that computes with Pillow."""
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(**RULES[family])
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**RULES[family])
