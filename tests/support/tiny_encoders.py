"""Tiny seeded encoders of every family, built with transformers."""

from __future__ import annotations

import json
import string
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from tests.support.tiny_models import double_precision
from tests.support.tiny_other_shapes import ENCODERS, SHAPE


def encoder_config(family: str) -> dict[str, Any]:
    """Returns the config.json of an encoder that pools the mean."""
    config = encoder("gte" if family == "new" else family).config.to_dict()
    own = {"model_type": family, "architectures": ["Model"], "pooling": {"mode": "mean"}}
    return config | own


@cache
def encoder(
    family: str, classifies: bool = False, num_labels: int = 3, head: str = "Sequence"
) -> Any:
    """Returns the torch model in float32, eval mode; one that `classifies` has labels of texts, or
    of tokens with the head "Token".
    """
    config = transformers.AutoConfig.for_model(family, **SHAPE | ENCODERS[family])
    name = f"AutoModelFor{head}Classification" if classifies else "AutoModel"
    kind = getattr(transformers, name)
    config.num_labels = num_labels
    model = kind.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            norm = "norm" in name.lower()
            if tensor.is_floating_point():
                tensor.copy_(1 + 0.2 * noise if norm and "bias" not in name else 0.3 * noise)
    return model.eval()


def in_float64(model: Any) -> Any:
    """Returns the same model in float64; run it inside `double_precision()`."""
    with double_precision():
        config = deepcopy(model.config)  # _from_config writes its dtype there
        twin = type(model)._from_config(config, attn_implementation="eager").double().eval()
        twin.load_state_dict(model.state_dict())
    return twin


def save_classifier(path: Path, family: str = "bert", num_labels: int = 3, **config: Any) -> Path:
    """Saves a classifier and its tokenizer; `config` is set in config.json."""
    encoder(family, classifies=True, num_labels=num_labels).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    save_word_tokenizer(path, segments=family == "bert")
    return path


def save_word_tokenizer(path: Path, *, segments: bool = True) -> None:
    """Saves a tokenizer of letters in lower case, whose template puts [CLS] and [SEP] around texts;
    without `segments` it is RoBERTa's, which has two [SEP] between them.
    """
    letters = string.ascii_lowercase + string.digits + "?.!,"
    words = ["[UNUSED]", "[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters]
    words += [f"##{letter}" for letter in letters]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(words[:5])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = (("[SEP]", 4), ("[CLS]", 3))
    kind = processors.BertProcessing if segments else processors.RobertaProcessing
    tokenizer.post_processor = kind(*ends)
    tokenizer.save(str(path / "tokenizer.json"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep")}
    (path / "tokenizer_config.json").write_text(json.dumps(named))


def header_words(path: Path) -> list[str]:
    """Returns the words of such a tokenizer as llama.cpp's converter writes them: those that begin
    a word behind a space, special ones as they are.
    """
    known = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    return [
        word if word.startswith("[") else f"\u2581{word}".removeprefix("\u2581##")
        for word in sorted(known, key=known.__getitem__)
    ]


def save_encoder(
    path: Path,
    family: str,
    *,
    mode: str = "mean",
    normalize: bool = True,
    limits: dict[str, Any] | None = None,
) -> Path:
    """Saves an encoder as sentence-transformers does; `limits` are sentence_bert_config.json."""
    encoder(family).save_pretrained(path)
    save_modules(path, mode, SHAPE["hidden_size"], normalize=normalize)
    (path / "sentence_bert_config.json").write_text(json.dumps(limits or {}))
    return path


def save_modules(path: Path, mode: str, width: int, *, normalize: bool = True) -> None:
    """Writes the modules of an embedder beside its transformer, as sentence-transformers does."""
    package = "sentence_transformers.models"
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"{package}.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    modules[0]["path"] = ""
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    named = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
    named["last"] = "pooling_mode_lasttoken"
    flags = {flag: name == mode for name, flag in named.items()}
    pooling = {"word_embedding_dimension": width, **flags}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
