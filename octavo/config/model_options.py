"""Options of the model, LoRA adapters, images and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option
from octavo.config.processors import ProcessorEntry, processor_entries

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    model: str = option(
        DEFAULT_MODEL,
        "Model",
        "Load this name, path or repository",
        details="A short name such as smollm2, a directory that Hugging Face saved, a .gguf file,"
        " or a model on Hugging Face: OWNER/REPO, OWNER/REPO:QUANT or OWNER/REPO/FILE.gguf.",
        common=True,
    )
    tokenizer: str | None = option(
        None, "Model", "Load the tokenizer from this path", derived="the model's", metavar="PATH"
    )
    strict_files: bool = option(
        False,
        "Model",
        "Refuse unknown pre-tokenizers of GGUF files",
        details="Without it an unknown name is treated as `default`, with a warning. `octavo serve"
        " --strict` implies it.",
    )
    skip_tokenizer_init: bool = option(
        False, "Model", "Load no tokenizer", details="Prompts are then token ids."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Model",
        "Set the precision of activations",
        details="auto keeps that of the checkpoint.",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "Model",
        "Read weights, or make random ones (dummy)",
        details="dummy needs only the model's config.json, to measure speed and memory.",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = option(
        None,
        "Model",
        "Quantize the weights while loading",
        details="fp8 (e4m3) runs on torch and reference.",
        common=True,
    )
    max_model_len: int | None = option(
        None,
        "Model",
        "Limit prompt plus output to N tokens",
        derived="the model's",
        common=True,
        unit="count",
        low=1,
    )
    max_encoder_len: int | None = option(
        None,
        "Model",
        "Limit an encoder-decoder's input to N rows",
        details="A row is a token of text; a second of audio has 50.",
        derived="the model's",
        unit="count",
        low=1,
    )
    served_model_name: str | None = option(
        None,
        "Model",
        "Name the model in the API",
        derived="from its path",
    )
    chat_template: str | None = option(
        None,
        "Model",
        "Use this Jinja template, file or name",
        derived="the model's",
        common=True,
    )
    tool_call_parser: str | None = option(
        None,
        "Structured output",
        "Parse tool calls as e.g. hermes",
        details="The [formats](formats.md) are listed on a page of their own.",
        derived="by chat template",
    )
    reasoning_parser: str | None = option(
        None,
        "Structured output",
        "Parse reasoning as e.g. qwen3, or none",
        details="The [formats](formats.md) are listed on a page of their own.",
        derived="by chat template",
    )
    classifier_from_token: str | None = option(
        None,
        "Model",
        "Score texts by these two tokens' logits, e.g. no,yes",
        details="Makes a decoder a classifier: the score is the second token's logit minus the"
        " first's, as Qwen3-Reranker needs. By default modules.json decides.",
        metavar="NO,YES",
    )
    generation_config: str = option(
        "auto",
        "Sampling",
        "Take sampling defaults from here",
        details="auto: the model's generation_config, else the values recommended for a short name,"
        " else values that suit most models. vllm: those of SamplingParams. A path: a"
        " generation_config.json or its directory.",
        metavar="SOURCE",
    )
    override_generation_config: str | None = option(
        None,
        "Sampling",
        "Set sampling defaults, as a JSON object",
        details="""For example '{"temperature": 0.6, "max_new_tokens": 512}'.""",
        metavar="JSON",
    )
    seed: int = option(0, "Sampling", "Seed requests that have no seed of their own")
    max_logprobs: int = option(
        20, "Sampling", "Limit the logprobs of a request to N per token", low=0
    )


@dataclass(frozen=True, slots=True)
class LoraOptions:
    enable_lora: bool = option(
        False,
        "LoRA",
        "Let requests name LoRA adapters",
        details="Adapters are directories as PEFT saves them.",
    )
    max_loras: int = option(8, "LoRA", "Keep at most N adapters on the device", low=1)
    max_cpu_loras: int | None = option(
        None,
        "LoRA",
        "Keep at most N adapters in host memory",
        details="At least max_loras.",
        derived="max_loras",
        low=1,
    )
    max_lora_rank: int = option(64, "LoRA", "Accept adapters up to this rank, at most 1024", low=1)
    lora_dtype: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto",
        "LoRA",
        "Store adapters in this precision",
        details="auto is float32, or bfloat16 if the file has it; int8 is approximate and takes"
        " half of bfloat16's bytes.",
    )

    @property
    def num_slots(self) -> int:
        """Number of adapters on the device; 0 if LoRA is disabled."""
        return self.max_loras if self.enable_lora else 0


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Options of images in prompts."""

    max_images: int = option(16, "Multimodal", "Accept at most N images in a prompt", low=1)
    max_image_tokens: int = option(
        2048,
        "Multimodal",
        "Scale larger images down to N tokens",
        details="Applies to models that keep an image's shape.",
        low=1,
    )
    max_image_bytes: int = option(
        20 << 20, "Multimodal", "Refuse larger image files", unit="bytes", low=1
    )
    max_image_pixels: int = option(
        50_000_000, "Multimodal", "Refuse images with more than N pixels", unit="count", low=1
    )
    media_dir: str | None = option(
        None, "Multimodal", "Let prompts name image files in this directory", derived="none"
    )
    allow_media_urls: bool = option(
        False, "Multimodal", "Fetch images from http and https URLs in prompts"
    )


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    logits_processors: tuple[str, ...] = option(
        (),
        "Sampling",
        "Let requests process logits by this function",
        details="A Python function, as NAME=MODULE:FUNCTION or MODULE:FACTORY(NUMBERS); native and"
        " reference.",
        metavar="NAME=FUNCTION",
    )
    logits_processor_timeout: float = option(
        1.0,
        "Sampling",
        "Fail a request if a processor takes N seconds",
        low=0.001,
    )

    structured_close: bool = option(
        False,
        "Structured output",
        "Close structured output by a short path before max_tokens",
        details="Changes the last tokens of an answer that would be cut off (native, reference).",
    )
    structured_open_objects: bool = option(
        False,
        "Structured output",
        "Allow properties that a JSON schema does not name",
        details="Applies to objects without additionalProperties.",
    )

    @property
    def processors(self) -> list[ProcessorEntry]:
        """Parsed functions that requests may name; raises ConfigError if the option is invalid."""
        return processor_entries(self.logits_processors)
