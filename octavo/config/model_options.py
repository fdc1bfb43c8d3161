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
        "Load this model: name, path or repository",
        details="A short name such as smollm2, a directory in the Hugging Face format, a .gguf"
        " file, or a model on Hugging Face: OWNER/REPO, OWNER/REPO:QUANT or OWNER/REPO/FILE.gguf.",
        common=True,
    )
    mmproj: str | None = option(
        None,
        "Model",
        "Read the towers of a GGUF model",
        details="Towers read images and audio. A path, or OWNER/REPO/FILE.gguf on Hugging Face;"
        " none: load the language model alone. See [images](../guides/images.md#gguf).",
        derived="beside the file",
        metavar="FILE",
    )
    tokenizer: str | None = option(
        None, "Model", "Load the tokenizer from this path", derived="the model's", metavar="PATH"
    )
    strict_files: bool = option(
        False,
        "Model",
        "Reject GGUF files with an unknown pre-tokenizer",
        details="By default, an unknown name is treated as `default`, with a warning. Implied by"
        " `octavo serve --strict`.",
    )
    skip_tokenizer_init: bool = option(
        False, "Model", "Load no tokenizer", details="Prompts must be token ids."
    )
    enable_prompt_embeds: bool = option(
        False,
        "Model",
        "Accept embeddings as prompts (`prompt_embeds`)",
        details="For decoders of text in one process. Clients who may send embeddings can make the"
        " model read what no token spells.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Model",
        "Set the precision of activations",
        details="auto: the precision of the checkpoint.",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "Model",
        "Load weights, or use random weights (dummy)",
        details="dummy requires only config.json; use it to measure speed and memory.",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = option(
        None,
        "Model",
        "Quantize the weights while loading",
        details="fp8 (e4m3) requires the torch or reference backend.",
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
        "Limit encoder-decoder inputs to N tokens",
        details="One second of audio counts as 50 tokens.",
        derived="the model's",
        unit="count",
        low=1,
    )
    served_model_name: str | None = option(
        None,
        "Model",
        "Set the model name in the API",
        derived="from path",
    )
    chat_template: str | None = option(
        None,
        "Model",
        "Use this Jinja template (file or name)",
        derived="the model's",
        common=True,
    )
    tool_call_parser: str | None = option(
        None,
        "Structured output",
        "Set the tool call parser, e.g. hermes",
        details="See the list of [formats](formats.md).",
        derived="from chat template",
    )
    reasoning_parser: str | None = option(
        None,
        "Structured output",
        "Set the reasoning parser, e.g. qwen3",
        details="See the list of [formats](formats.md).",
        derived="from chat template",
    )
    classifier_from_token: str | None = option(
        None,
        "Model",
        "Classify by the logits of two tokens, e.g. no,yes",
        details="Turns a decoder into a classifier, e.g. for Qwen3-Reranker: the score is the"
        " logit of the second token minus the logit of the first. The default is read from"
        " modules.json.",
        metavar="NO,YES",
    )
    convert: Literal["embed", "token_embed"] | None = option(
        None,
        "Model",
        "Serve a decoder as an embedding model",
        details="embed: the normalized hidden state of the last token; token_embed: the hidden"
        " state of each token after the last norm, at `/pooling`. The default is read from the"
        " checkpoint.",
        derived="none",
    )
    generation_config: str = option(
        "auto",
        "Sampling",
        "Load sampling defaults from this source",
        details="auto: generation_config.json of the model, else values recommended for its short"
        " name, else general defaults. vllm: the defaults of SamplingParams. A path: a"
        " generation_config.json or its directory.",
        metavar="SOURCE",
    )
    override_generation_config: str | None = option(
        None,
        "Sampling",
        "Override sampling defaults (JSON object)",
        details="""For example '{"temperature": 0.6, "max_new_tokens": 512}'.""",
        metavar="JSON",
    )
    seed: int = option(0, "Sampling", "Set the default seed of requests")
    max_logprobs: int = option(
        20, "Sampling", "Allow at most N logprobs per token (-1: all)", low=-1
    )

    def get_max_logprobs(self, vocab_size: int) -> int:
        return vocab_size if self.max_logprobs == -1 else self.max_logprobs


@dataclass(frozen=True, slots=True)
class LoraOptions:
    enable_lora: bool = option(
        False,
        "LoRA",
        "Enable LoRA adapters",
        details="Adapters are directories in the PEFT format.",
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
    max_lora_rank: int = option(64, "LoRA", "Accept adapters up to rank N, at most 1024", low=1)
    lora_dtype: Literal["auto", "float32", "bfloat16", "int8"] = option(
        "auto",
        "LoRA",
        "Store adapters in this precision",
        details="auto: bfloat16 if the file has bfloat16, else float32. int8 is approximate and"
        " takes half the memory of bfloat16.",
    )

    @property
    def num_slots(self) -> int:
        """Number of adapters on the device; 0 if LoRA is disabled."""
        return self.max_loras if self.enable_lora else 0


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Options of images, videos and audio in prompts."""

    max_images: int = option(16, "Multimodal", "Accept at most N images per prompt", low=1)
    max_image_tokens: int | None = option(
        None,
        "Multimodal",
        "Resize larger images to N tokens",
        details="Applies to models that preserve the aspect ratio. The default is a square of the"
        " model's longest edge, or 2048 without one.",
        derived="the model's, or 2048",
        low=1,
    )
    max_image_bytes: int = option(
        20 << 20, "Multimodal", "Reject larger image files", unit="bytes", low=1
    )
    max_image_pixels: int = option(
        50_000_000, "Multimodal", "Reject images with more than N pixels", unit="count", low=1
    )
    max_videos: int = option(1, "Multimodal", "Accept at most N videos per prompt", low=1)
    max_video_frames: int = option(
        64, "Multimodal", "Sample at most N frames of a video", unit="count", low=1
    )
    max_video_bytes: int = option(
        100 << 20, "Multimodal", "Reject larger video files", unit="bytes", low=1
    )
    max_audios: int = option(8, "Multimodal", "Accept at most N audio files per prompt", low=1)
    max_audio_bytes: int = option(
        50 << 20, "Multimodal", "Reject larger audio files", unit="bytes", low=1
    )
    media_dir: str | None = option(
        None, "Multimodal", "Allow media files from this directory in prompts", derived="none"
    )
    allow_media_urls: bool = option(
        False, "Multimodal", "Allow http and https media URLs in prompts"
    )


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    logits_processors: tuple[str, ...] = option(
        (),
        "Sampling",
        "Register a logits processor for requests",
        details="A Python function, given as NAME=MODULE:FUNCTION or MODULE:FACTORY(NUMBERS)."
        " Supported by native and reference.",
        metavar="NAME=FUNCTION",
    )
    logits_processor_timeout: float = option(
        1.0,
        "Sampling",
        "Fail a request if a processor exceeds N seconds",
        low=0.001,
    )

    structured_close: bool = option(
        False,
        "Structured output",
        "Complete structured output before max_tokens",
        details="Chooses a short completion if the output would otherwise be truncated (native,"
        " reference).",
    )
    structured_open_objects: bool = option(
        False,
        "Structured output",
        "Allow properties that a JSON schema does not list",
        details="Applies to objects without additionalProperties.",
    )

    @property
    def processors(self) -> list[ProcessorEntry]:
        """Parsed functions that requests may name; raises ConfigError if the option is invalid."""
        return processor_entries(self.logits_processors)
