"""Tiny models as llama.cpp's own converter writes them, without a vocabulary."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch


def convert(source: Path, folder: Path, *, without: tuple[str, ...] = (), **written: Any) -> Path:
    """Converts a Hugging Face directory to GGUF in float32 within `folder` and returns the file.

    `written` are keys of config.json that the converter reads and transformers 5 no longer writes,
    `without` those that transformers 5 writes for models that do not have them.
    transformers would drop them, so that the converter gets the file's keys instead of those of a
    transformers config.
    """
    copy = folder / "model"
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text()) | written
    config = {name: value for name, value in config.items() if name not in without}
    vocabulary = {"model": {"vocab": list(range(config["vocab_size"]))}, "added_tokens": []}
    (copy / "tokenizer.json").write_text(json.dumps(vocabulary))
    out = folder / "model.gguf"
    with mock.patch.dict(sys.modules, {"conversion.deepseek": _no_deepseek()}):
        logging.disable(logging.CRITICAL)
        try:
            _write(copy, config, out)
        finally:
            logging.disable(logging.NOTSET)
    return out


def _write(source: Path, config: dict[str, Any], out: Path) -> None:
    from conversion import get_model_class
    from conversion.base import ModelBase

    known = mock.patch.object(ModelBase, "load_hparams", lambda *_, **__: dict(config))
    with torch.inference_mode(), known:
        model = get_model_class(config["architectures"][0])(
            source, gguf.LlamaFileType.ALL_F32, out, eager=True, hparams=config
        )
        for each in (model, getattr(model, "impl", model)):
            each.set_vocab = lambda: None
        model.write()


def _no_deepseek() -> types.ModuleType:
    """Returns a stand-in for the converter's module of DeepSeek, which names tensors that the gguf
    package released with it lacks; other families' modules import it.
    """
    from conversion.base import TextModel

    module = types.ModuleType("conversion.deepseek")

    class DeepseekV2Model(TextModel):
        model_arch = gguf.MODEL_ARCH.DEEPSEEK2

    module.DeepseekV2Model = DeepseekV2Model
    return module
