"""Tiny models as llama.cpp's own converter writes them, without a vocabulary."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch


def convert(
    source: Path,
    folder: Path,
    *,
    name: str = "model.gguf",
    mmproj: bool = False,
    without: tuple[str, ...] = (),
    kind: gguf.LlamaFileType = gguf.LlamaFileType.ALL_F32,
    add_vocabulary: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **written: Any,
) -> Path:
    """Converts a Hugging Face directory to GGUF within `folder` and returns the file. Its matrices
    are of the `kind`; `add_vocabulary` is given the writer of the header. With `mmproj` the vision
    tower is written, else the language model.

    `written` are keys of config.json that the converter reads and transformers 5 no longer writes,
    `without` those that transformers 5 writes for models that do not have them.
    transformers would drop them, so that the converter gets the file's keys instead of those of a
    transformers config.
    """
    copy = folder / name.removesuffix(".gguf")
    shutil.copytree(source, copy)
    config = json.loads((copy / "config.json").read_text()) | written
    config = {name: value for name, value in config.items() if name not in without}
    text = config.get("text_config") or config
    words = {"type": "WordPiece", "vocab": list(range(text["vocab_size"]))}
    vocabulary = {"model": words, "added_tokens": []}
    if not mmproj:
        (copy / "tokenizer.json").write_text(json.dumps(vocabulary))
    out = folder / name
    _import_newer()
    logging.disable(logging.CRITICAL)
    try:
        with _written_to(out, copy, config, kind, mmproj=mmproj) as model:
            add_vocabulary(getattr(model, "impl", model).gguf_writer)
    finally:
        logging.disable(logging.NOTSET)
    return out


@contextlib.contextmanager
def _written_to(
    out: Path,
    source: Path,
    config: dict[str, Any],
    kind: gguf.LlamaFileType,
    *,
    mmproj: bool,
) -> Iterator[Any]:
    """Yields the converter's model, which is written at the end."""
    from conversion import get_model_class
    from conversion.base import ModelBase

    known = mock.patch.object(ModelBase, "load_hparams", lambda *_, **__: dict(config))
    plain = mock.patch.object(ModelBase, "no_mtp", new=True)
    with torch.inference_mode(), known, plain:
        model = get_model_class(config["architectures"][0], mmproj)(
            source, kind, out, eager=True, hparams=config
        )
        for each in (model, getattr(model, "impl", model)):
            each.set_vocab = lambda: None
        yield model
        model.write()


@cache
def _import_newer() -> None:
    """Imports the converter's modules whose classes name tensors and architectures that the gguf
    package released with it lacks; other families' modules import them.
    """

    class Named:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name, None)

    with (
        mock.patch.object(gguf, "MODEL_TENSOR", Named(gguf.MODEL_TENSOR)),
        mock.patch.object(gguf, "MODEL_ARCH", Named(gguf.MODEL_ARCH)),
    ):
        for module in ("deepseek", "hunyuan", "minimax"):
            importlib.import_module(f"conversion.{module}")
