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
from tests.support.tiny_tokenizer import save_tiny_tokenizer

FAMILIES = ("gemma3", "qwen2_vl", "qwen2_5_vl")

IMAGE_ID, BEGIN_ID, END_ID = 300, 301, 302
WORDS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "qwen2_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
"""Texts of the tokens of an image's rows, of its beginning and of its end."""

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
QWEN_TEXT = {**TEXT, "num_hidden_layers": 2, "rope_parameters": MROPE}
QWEN_TOKENS = {"image_token_id": IMAGE_ID, "vision_start_token_id": BEGIN_ID}
QWEN_TOKENS |= {"vision_end_token_id": END_ID, "video_token_id": 303}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **TEXT,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE_ID,
        "boi_token_index": BEGIN_ID,
        "eoi_token_index": END_ID,
    },
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "mlp_ratio": 2,
        },
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
        },
        **QWEN_TOKENS,
    },
}
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
RULES: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 32, "width": 32}, "resample": 2}
    | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    "qwen2_vl": {"min_pixels": 16 * 16, "max_pixels": 48 * 48, "patch_size": 4, **COLOURS},
    "qwen2_5_vl": {"min_pixels": 16 * 16, "max_pixels": 48 * 48, "patch_size": 4, **COLOURS},
}
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}IMAGE"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
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
    image, begin, end = WORDS[family]
    place = begin if family == "gemma3" else f"{begin}{image}{end}"
    settings_file = tiny.path / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings["chat_template"] = TEMPLATE.replace("IMAGE", place)
    settings_file.write_text(json.dumps(settings))
    (tiny.path / "preprocessor_config.json").write_text(json.dumps(RULES[family]))
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
