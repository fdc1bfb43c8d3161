"""Tiny seeded models that read images, with tokenizers that know their image tokens, and images to
show them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from tokenizers import AddedToken, Tokenizer

from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.tiny_other_shapes import CONFIGS, IMAGE_ID, IMAGE_TEXT
from tests.support.tiny_tokenizer import save_tiny_tokenizer

FAMILIES = tuple(CONFIGS)
ALL = (*CONFIGS, *IMAGE_TEXT)
"""Those families, and the models of `image_text.py`."""
QWEN = tuple(family for family in FAMILIES if family.startswith("qwen"))

COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
STANDARD = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


class Seeing(NamedTuple):
    """How a family writes and prepares images: its special tokens from IMAGE_ID on, the text that
    stands for an image, preprocessor_config.json, and transformers' processor that computes with
    Pillow.
    """

    words: tuple[str, ...]
    place: str
    rules: dict[str, Any]
    processor: str
    options: tuple[tuple[str, int], ...] = ()
    """Options that the family's own processor gives to that of images."""


QWEN_SEEING = Seeing(
    ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    "<|vision_start|><|image_pad|><|vision_end|>",
    {"min_pixels": 16 * 16, "max_pixels": 48 * 48, "patch_size": 4, **COLOURS},
    "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
)
PIXTRAL = Seeing(
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "[IMG]",
    {"size": {"longest_edge": 40}, "patch_size": 4},
    "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
)
CLIP = Seeing(
    ("<image>",),
    "<image>",
    {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "resample": 3},
    "clip.image_processing_pil_clip.CLIPImageProcessorPil",
)
IDEFICS3 = Seeing(
    (
        *("<image>", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    "<image>",
    {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
    "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
)
INTERNVL = Seeing(
    ("<IMG_CONTEXT>", "<img>", "</img>"),
    "<IMG_CONTEXT>",
    {"size": {"height": 16, "width": 16}, "max_patches": 6},
    "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
    (("crop_to_patches", 1),),
)
PALIGEMMA = Seeing(
    ("<image>",),
    "<image>",
    {"size": {"height": 16, "width": 16}, "resample": 3, **STANDARD},
    "siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
)
NEXT = Seeing(
    ("<image>",),
    "<image>",
    {"size": {"height": 16, "width": 16}, "crop_size": {"height": 16, "width": 16}}
    | {"image_grid_pinpoints": IMAGE_TEXT["llava_next"]["image_grid_pinpoints"]},
    "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
)
GEMMA4 = Seeing(
    ("<|image|>", "<|image>", "<image|>", "<|video|>"),
    "<|image|>",
    {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2},
    "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
)
SEEING = {
    "gemma4:clipped": GEMMA4,
    "gemma4:standardized": GEMMA4,
    "gemma3": Seeing(
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
        {"size": {"height": 32, "width": 32}, "resample": 2, **STANDARD},
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
    ),
    **dict.fromkeys(QWEN, QWEN_SEEING),
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3._replace(
        processor="smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil"
    ),
    "internvl": INTERNVL,
    "internvl:6b": INTERNVL,
    "paligemma": PALIGEMMA,
    "paligemma:2": PALIGEMMA,
    "llava_next": NEXT,
    "llava_onevision": NEXT._replace(
        rules={"size": {"height": 16, "width": 16}}
        | {"image_grid_pinpoints": IMAGE_TEXT["llava_onevision"]["image_grid_pinpoints"]},
        processor="llava_onevision.image_processing_pil_llava_onevision"
        ".LlavaOnevisionImageProcessorPil",
    ),
    "mistral3": PIXTRAL._replace(options=(("patch_size", 8),)),
    "llava": CLIP,
    "llava:pixtral": PIXTRAL,
    "llava:siglip": CLIP._replace(
        rules={"size": {"height": 27, "width": 27}, "resample": 3, **STANDARD},
        processor="siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
    ),
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
    seeing = SEEING[family]
    tiny = tiny_model(family.partition(":")[0], **(CONFIGS | IMAGE_TEXT)[family])
    save_tiny_tokenizer(tiny.path)
    file = str(tiny.path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    missing = IMAGE_ID - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused{index}>" for index in range(missing)])
    words = [AddedToken(word, special=True, normalized=False) for word in seeing.words]
    tokenizer.add_special_tokens(words)
    tokenizer.save(file)
    settings_file = tiny.path / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    video = seeing.place.replace(seeing.words[0], "<|video_pad|>")
    settings["chat_template"] = TEMPLATE.replace("IMAGE", seeing.place).replace("VIDEO", video)
    settings_file.write_text(json.dumps(settings))
    (tiny.path / "preprocessor_config.json").write_text(json.dumps(seeing.rules))
    if family.startswith("qwen3"):
        rules = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "fps": 2}
        (tiny.path / "video_preprocessor_config.json").write_text(json.dumps(rules))
    return SeeingModel(family, tiny, seeing.place)


def picture(seed: int, width: int = 45, height: int = 37) -> PIL.Image.Image:
    """Returns a seeded image of soft shapes."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.BICUBIC)


def processor_of(family: str) -> Any:
    """Returns transformers' image processor that computes with Pillow."""
    seeing = SEEING[family]
    module, _, name = seeing.processor.rpartition(".")
    made = getattr(import_module(f"transformers.models.{module}"), name)
    return made(**{**seeing.rules, **dict(seeing.options)})
