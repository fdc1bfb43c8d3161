"""Tiny seeded encoders of every family, built with transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.tiny_models import double_precision

SHAPE = {
    "vocab_size": 130,
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 400,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": 72, "n_layers": 3, "n_heads": 4, "hidden_dim": 90},
    "roberta": {},
    "xlm-roberta": {},
    "mpnet": {},
    "nomic_bert": {},
}


def encoder_config(family: str) -> dict[str, Any]:
    """Returns the config.json of an encoder that pools the mean."""
    config = encoder(family).config.to_dict()
    return config | {"architectures": ["Model"], "pooling": {"mode": "mean"}}


@cache
def encoder(family: str, classifies: bool = False) -> Any:
    """Returns the torch model in float32, eval mode; one that `classifies` has three labels."""
    config = transformers.AutoConfig.for_model(family, **SHAPE, **ENCODERS[family])
    kind = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    config.num_labels = 3
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
    flags = {flag: name == mode for name, flag in named.items()}
    pooling = {"word_embedding_dimension": SHAPE["hidden_size"], **flags}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "sentence_bert_config.json").write_text(json.dumps(limits or {}))
    return path
