"""Options of the model itself, of its adapters, its images and how its tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option
from octavo.config.processors import ProcessorEntry, processor_entries

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of the model, its numbers and its tokenizer."""

    model: str = option(
        DEFAULT_MODEL, "short name, local path (directory or .gguf) or Hugging Face repository"
    )
    tokenizer: str | None = option(None, "path of a tokenizer, where it is not the model's own")
    skip_tokenizer_init: bool = option(False, "load no tokenizer; prompts are token ids")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "precision of the arithmetic; auto keeps the file's"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "auto: the model's files; dummy: random weights, for which its config.json is enough (to"
        " measure speed and memory)",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = option(
        None, "pack the weights at load; fp8 (e4m3) on torch and reference"
    )
    max_model_len: int | None = option(
        None, "longest context (prompt + output); default the model's", unit="count", low=1
    )
    max_encoder_len: int | None = option(
        None,
        "longest input of an encoder before a decoder, in its rows (a text's tokens, 50 a second of"
        " audio); default the model's",
        unit="count",
        low=1,
    )
    served_model_name: str | None = option(
        None, "name in the API; default the model as given, without folders"
    )
    chat_template: str | None = option(
        None, "a Jinja template, or the path of one, in place of the model's"
    )
    tool_call_parser: str | None = option(
        None,
        "format in which the model calls functions, e.g. hermes; default the chat template's",
    )
    reasoning_parser: str | None = option(
        None,
        "tags of the model's reasoning, e.g. qwen3, or none; default the chat template's",
    )
    classifier_from_token: str | None = option(
        None,
        "make a decoder a classifier whose score is the second token's logit less the first one's,"
        " e.g. no,yes for Qwen3-Reranker; default what modules.json says",
    )
    seed: int = option(0, "seed from which unseeded requests draw theirs")
    max_logprobs: int = option(20, "most alternatives a request may ask for", low=0)


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Options of adapters (LoRA) that requests may name."""

    enable_lora: bool = option(False, "take adapters (LoRA, as PEFT saves them), by request")
    max_loras: int = option(8, "most adapters on the device, in use or not", low=1)
    max_cpu_loras: int | None = option(
        None, "most adapters in host memory; default max_loras, and no fewer", low=1
    )
    max_lora_rank: int = option(64, "highest rank of an adapter's matrices, at most 1024", low=1)
    lora_dtype: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto",
        "precision that adapters are kept in; auto: float32, or bfloat16 where the file has it;"
        " int8 is approximate, in half of bfloat16's bytes",
    )

    @property
    def num_slots(self) -> int:
        """Adapters on the device; 0 where none are taken."""
        return self.max_loras if self.enable_lora else 0


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Options of the images that prompts may hold."""

    max_images: int = option(16, "most images of one prompt", low=1)
    max_image_tokens: int = option(
        2048, "most tokens of an image that keeps its shape; larger ones are scaled down", low=1
    )
    max_image_bytes: int = option(
        20 << 20, "most bytes of a file with an image; default 20MiB", unit="bytes", low=1
    )
    max_image_pixels: int = option(
        50_000_000, "most pixels of an image as it is sent", unit="count", low=1
    )
    media_dir: str | None = option(
        None, "folder whose files prompts may name as images; default none may be named"
    )
    allow_media_urls: bool = option(
        False, "fetch images from the http and https addresses that prompts name"
    )


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Options of how tokens are drawn."""

    logits_processors: tuple[str, ...] = option(
        (),
        "NAME=MODULE:FUNCTION that requests may name to change their logits (native, reference),"
        " or MODULE:FACTORY(NUMBERS); may be given several times",
    )
    logits_processor_timeout: float = option(
        1.0, "seconds after which a logits processor's call fails its request", low=0.001
    )

    structured_close: bool = option(
        False,
        "complete an answer of a given form by a short way before its length ends, where enough"
        " tokens remain (native, reference); changes its last tokens",
    )
    structured_open_objects: bool = option(
        False,
        "allow properties that a JSON schema does not name where it is silent about"
        " additionalProperties",
    )

    @property
    def processors(self) -> list[ProcessorEntry]:
        """The functions that requests may name; ConfigError where the option is no list of them."""
        return processor_entries(self.logits_processors)
