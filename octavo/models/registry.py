"""Builds the Programs of a config; the module of its model_type is imported on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple

from octavo.api.errors import UnsupportedModel
from octavo.models.audio import AudioLayout
from octavo.models.config_keys import refuse_unread
from octavo.models.derived import program_path, read_programs
from octavo.models.hf_config import HfConfig
from octavo.models.pooling import pooled_head, score_tokens
from octavo.models.vision import ImageLayout
from octavo.program.program import Program

Kind = Literal["decoder", "experts", "encoder", "encoder-decoder"]


class ModelFamily(NamedTuple):
    """A supported model_type, as shown by `octavo models` and the docs."""

    models: str
    """Well-known models of the family."""
    kind: Kind = "decoder"
    """Kind of its Programs; "experts" is a decoder with routed experts."""
    native: bool = True
    """Whether the native backend supports it; torch and reference support every family."""
    gguf_as: str | None = None
    """GGUF architecture under which llama.cpp stores the family, if it is another family's name."""
    module: str | None = None
    """Module that builds the family, if it is not named after the model_type."""


def _image_text(models: str) -> ModelFamily:
    """Returns a family that `image_text.py` builds."""
    return ModelFamily(models, module="image_text")


def _audio_text(models: str) -> ModelFamily:
    """Returns a family that `audio_text.py` builds."""
    return ModelFamily(models, module="audio_text")


FAMILIES: dict[str, ModelFamily] = {
    "albert": ModelFamily("ALBERT", "encoder"),
    "bamba": ModelFamily("Bamba"),
    "bart": ModelFamily("BART, DistilBART", "encoder-decoder"),
    "bert": ModelFamily("BERT, MiniLM, BGE, E5", "encoder"),
    "bloom": ModelFamily("BLOOM"),
    "camembert": ModelFamily("CamemBERT", "encoder"),
    "chatglm": ModelFamily("ChatGLM2, ChatGLM3", gguf_as="chatglm"),
    "cohere": ModelFamily("Command R"),
    "cohere2": ModelFamily("Command R7B, Command A"),
    "deberta-v2": ModelFamily("DeBERTa v2 and v3", "encoder"),
    "deepseek_v2": ModelFamily("DeepSeek V2, V2-Lite", "experts"),
    "deepseek_v3": ModelFamily("DeepSeek V3, R1", "experts", gguf_as="deepseek2"),
    "distilbert": ModelFamily("DistilBERT", "encoder", gguf_as="bert"),
    "electra": ModelFamily("ELECTRA", "encoder"),
    "ernie4_5": ModelFamily("ERNIE 4.5 0.3B"),
    "ernie4_5_moe": ModelFamily("ERNIE 4.5 MoE", "experts"),
    "eurobert": ModelFamily("EuroBERT", "encoder"),
    "exaone4": ModelFamily("EXAONE 4"),
    "falcon": ModelFamily("Falcon"),
    "falcon_h1": ModelFamily("Falcon-H1"),
    "gemma": ModelFamily("Gemma"),
    "gemma2": ModelFamily("Gemma 2"),
    "gemma3": ModelFamily("Gemma 3 with images"),
    "gemma3_text": ModelFamily("Gemma 3"),
    "gemma3n_text": ModelFamily("Gemma 3n"),
    "gemma4": ModelFamily("Gemma 4 with images and audio"),
    "gemma4_text": ModelFamily("Gemma 4"),
    "gemma4_unified": ModelFamily("Gemma 4 12B, text only"),
    "glm": ModelFamily("GLM-4 9B"),
    "glm4": ModelFamily("GLM-4-0414"),
    "glm4_moe": ModelFamily("GLM-4.5, GLM-4.6", "experts"),
    "glm4_moe_lite": ModelFamily("GLM-4.7-Flash", "experts", gguf_as="deepseek2"),
    "gpt2": ModelFamily("GPT-2"),
    "gpt_bigcode": ModelFamily("StarCoder, SantaCoder"),
    "gpt_neox": ModelFamily("Pythia, GPT-NeoX"),
    "gpt_oss": ModelFamily("gpt-oss", "experts"),
    "gptj": ModelFamily("GPT-J"),
    "granite": ModelFamily("Granite"),
    "granitemoe": ModelFamily("Granite 3 MoE", "experts"),
    "granitemoehybrid": ModelFamily("Granite 4", "experts"),
    "gte": ModelFamily("GTE multilingual, Arctic Embed 2 M", "encoder"),
    "hunyuan_v1_dense": ModelFamily("Hunyuan 0.5B to 7B"),
    "hunyuan_v1_moe": ModelFamily("Hunyuan-A13B", "experts"),
    "idefics3": _image_text("Idefics 3"),
    "internlm3": ModelFamily("InternLM3", gguf_as="llama"),
    "internvl": _image_text("InternVL 3"),
    "jamba": ModelFamily("Jamba", "experts"),
    "jina_embeddings_v3": ModelFamily("Jina embeddings v3, without adapters", "encoder"),
    "kimi_linear": ModelFamily("Kimi-Linear-48B-A3B", "experts"),
    "lfm2": ModelFamily("LFM2"),
    "lfm2_moe": ModelFamily("LFM2-8B-A1B", "experts"),
    "llama": ModelFamily("Llama 2 and 3, SmolLM2, TinyLlama, Yi"),
    "llava": _image_text("LLaVA 1.5, Pixtral 12B"),
    "llama4_text": ModelFamily("Llama 4 Scout, Maverick", "experts"),
    "llava_next": _image_text("LLaVA-NeXT 1.6"),
    "llava_onevision": _image_text("LLaVA-OneVision"),
    "m2m_100": ModelFamily("M2M-100, NLLB-200", "encoder-decoder"),
    "mamba": ModelFamily("Mamba"),
    "mamba2": ModelFamily("Mamba 2, Codestral Mamba"),
    "marian": ModelFamily("Marian, OPUS-MT", "encoder-decoder"),
    "mbart": ModelFamily("mBART, mBART-50", "encoder-decoder"),
    "minimax_m2": ModelFamily("MiniMax-M2, M2.1, M2.5", "experts"),
    "ministral3": ModelFamily("Ministral 3"),
    "mistral": ModelFamily("Mistral 7B", gguf_as="llama"),
    "mistral3": _image_text("Mistral Small 3.1 and 3.2, Ministral 3 with images"),
    "mixtral": ModelFamily("Mixtral", "experts", gguf_as="llama"),
    "modernbert": ModelFamily("ModernBERT, GTE, Granite embeddings", "encoder"),
    "mpnet": ModelFamily("all-mpnet", "encoder"),
    "mpt": ModelFamily("MPT"),
    "mt5": ModelFamily("mT5", "encoder-decoder", gguf_as="t5"),
    "nemotron": ModelFamily("Nemotron, Minitron"),
    "nemotron_h": ModelFamily("Nemotron-H, Nemotron 3 Nano", "experts"),
    "new": ModelFamily("GTE v1.5 and multilingual, first release", "encoder"),
    "nomic_bert": ModelFamily("nomic-embed-text", "encoder"),
    "olmo": ModelFamily("OLMo"),
    "olmo2": ModelFamily("OLMo 2"),
    "olmo3": ModelFamily("OLMo 3", gguf_as="olmo2"),
    "olmoe": ModelFamily("OLMoE", "experts"),
    "opt": ModelFamily("OPT"),
    "paligemma": _image_text("PaliGemma, PaliGemma 2"),
    "phi": ModelFamily("Phi-1.5, Phi-2"),
    "phi3": ModelFamily("Phi-3, Phi-4"),
    "phimoe": ModelFamily("Phi-3.5-MoE", "experts"),
    "qwen2": ModelFamily("Qwen2, Qwen2.5"),
    "qwen2_audio": _audio_text("Qwen2-Audio"),
    "qwen2_5_vl": ModelFamily("Qwen2.5-VL"),
    "qwen2_moe": ModelFamily("Qwen1.5-MoE, Qwen2-57B-A14B", "experts"),
    "qwen2_vl": ModelFamily("Qwen2-VL"),
    "qwen3": ModelFamily("Qwen3"),
    "qwen3_5": ModelFamily("Qwen3.5 with images"),
    "qwen3_5_moe": ModelFamily("Qwen3.5 MoE with images", "experts"),
    "qwen3_5_moe_text": ModelFamily("Qwen3.5-35B-A3B", "experts"),
    "qwen3_5_text": ModelFamily("Qwen3.5"),
    "qwen3_moe": ModelFamily("Qwen3-30B-A3B", "experts"),
    "qwen3_next": ModelFamily("Qwen3-Next", "experts"),
    "qwen3_vl": ModelFamily("Qwen3-VL"),
    "qwen3_vl_moe": ModelFamily("Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B", "experts"),
    "roberta": ModelFamily("RoBERTa", "encoder", gguf_as="bert"),
    "seed_oss": ModelFamily("Seed-OSS"),
    "smollm3": ModelFamily("SmolLM3"),
    "smolvlm": _image_text("SmolVLM, SmolVLM2"),
    "stablelm": ModelFamily("StableLM"),
    "starcoder2": ModelFamily("StarCoder2"),
    "t5": ModelFamily("T5, Flan-T5", "encoder-decoder"),
    "voxtral": _audio_text("Voxtral"),
    "whisper": ModelFamily("Whisper", "encoder-decoder"),
    "xlm-roberta": ModelFamily("XLM-R, multilingual E5, BGE-M3", "encoder", gguf_as="bert"),
}
"""Families by Hugging Face model_type; each has a module here (with _ for -), or names one."""


def check_family(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for a model_type without a module or a stored Program."""
    model_type = HfConfig(config).model_type
    if model_type not in FAMILIES and not program_path(config).is_file():
        raise _unknown(model_type)


def _unknown(model_type: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {model_type!r} is not supported", hint="known are " + ", ".join(FAMILIES)
    )


def get_module(model_type: str) -> Any:
    """Returns the module that builds a family's Programs; raises UnsupportedModel for a model_type
    without one.
    """
    if model_type not in FAMILIES:
        raise _unknown(model_type)
    name = FAMILIES[model_type].module or model_type.replace("-", "_")
    return import_module(f"octavo.models.{name}")


def image_layout(config: Mapping[str, Any]) -> ImageLayout | None:
    """Returns a model's image layout; None if it reads no images."""
    if not isinstance(config.get("vision_config"), dict):
        return None
    hf = HfConfig(config)
    module = get_module(hf.model_type)
    found: ImageLayout | None = module.image_layout(hf) if hasattr(module, "image_layout") else None
    return found


def audio_layout(config: Mapping[str, Any]) -> AudioLayout | None:
    """Returns a model's audio layout; None if its decoder reads no audio."""
    if not isinstance(config.get("audio_config"), dict):
        return None
    hf = HfConfig(config)
    module = get_module(hf.model_type)
    found: AudioLayout | None = module.audio_layout(hf) if hasattr(module, "audio_layout") else None
    return found


def build_alignment(
    config: Mapping[str, Any], heads: Sequence[tuple[int, int]]
) -> dict[str, Program] | None:
    """Builds the Programs that align an encoder-decoder's output tokens with its input; None if the
    family has none. `heads` are pairs of a decoder layer and a head; (): the family's default.
    """
    hf = HfConfig(config)
    if hf.model_type not in FAMILIES:
        return None
    module = get_module(hf.model_type)
    has_heads = hasattr(module, "build_alignment")
    found: dict[str, Program] | None = module.build_alignment(hf, heads) if has_heads else None
    return found


def build_programs(config: Mapping[str, Any], *, every_key: bool = False) -> dict[str, Program]:
    """Builds the Programs of a model by name: "decoder" and, depending on the family, "encoder", or
    "vision" and "projector", "audio" and "audio_projector".

    With `every_key`, a config with a value that is never read is rejected. Programs that store KV
    declare the same cache groups in the same order.
    """
    check_family(config)
    hf = HfConfig(config)
    if hf.model_type not in FAMILIES:
        return read_programs(config)
    programs: dict[str, Program] = get_module(hf.model_type).build(hf)
    pools = any("pooled" in program.outputs for program in programs.values())
    if score_tokens(hf) and "decoder" not in programs:
        raise UnsupportedModel(f"{hf.model_type}: classifier_from_token requires a decoder")
    if not pools and pooled_head(hf) is not None:
        raise UnsupportedModel(
            f"{hf.model_type}: embeddings and classifiers of this family are not supported"
        )
    if every_key:
        refuse_unread(config, hf.values.asked)
    return programs
