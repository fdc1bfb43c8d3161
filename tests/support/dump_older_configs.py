"""Writes the tiny models' configs as transformers 4 does: run by hand, with that version installed
beside no PyTorch, as `python dump_older_configs.py NEWER.json ../data/older_configs.json`.

NEWER.json has each family's config as transformers 5 saved it (`every_family.newer_configs`); bases
of rope are taken from there, since some defaults have changed between the two.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MISTRAL = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 20,
}
"""Options of the tiny Mistral."""


def options_of(family: str, newer: dict[str, Any]) -> dict[str, Any]:
    """Returns the family's options in the words of transformers 4."""
    shapes = runpy.run_path(str(HERE / "tiny_shapes.py"))
    others = runpy.run_path(str(HERE / "tiny_other_shapes.py"))
    details = runpy.run_path(str(HERE / "tiny_details.py"))["DETAILS"]
    image_text = others["CONFIGS"] | others["IMAGE_TEXT"] | others["AUDIO_TEXT"]
    if family in image_text:
        seeing = dict(image_text[family])
        text = {**seeing["text_config"], **_older_rope(newer["text_config"])}
        text.pop("rope_parameters", None)
        return {**seeing, "text_config": text}
    if family in others["ENCODERS"]:
        options = {**others["SHAPE"], **others["ENCODERS"][family]}
    else:
        tables = shapes["SHAPES"] | shapes["ENCODER_DECODERS"] | {"mistral": MISTRAL}
        options = {**IDS, **tables[family], **details.get(family, {})}
    options.pop("rope_parameters", None)
    ties = {"tie_word_embeddings": newer["tie_word_embeddings"]} if family == "mt5" else {}
    return {**options, **ties, **_older_rope(newer)}


def _older_rope(newer: dict[str, Any]) -> dict[str, Any]:
    """Returns rope's parameters under the keys of transformers 4."""
    rope = dict(newer.get("rope_parameters") or {})
    by_type = [entry for entry in rope.values() if isinstance(entry, dict)]
    if by_type and by_type[0] == by_type[-1]:
        rope = dict(by_type[0])
    if "rope_type" not in rope:
        return {}
    options = {"rope_theta": rope.pop("rope_theta")}
    if "partial_rotary_factor" in rope:
        options["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "mrope_section" in rope:
        rope["rope_type"] = rope["type"] = "default"
    if len(rope) > 1 or rope["rope_type"] != "default":
        options["rope_scaling"] = rope
    return options


def main(source: str, target: str) -> None:
    import transformers

    found = {}
    for family, newer in json.loads(Path(source).read_text()).items():
        if family not in transformers.CONFIG_MAPPING:
            continue  # only transformers 5 has it
        config = transformers.AutoConfig.for_model(family, **options_of(family, newer))
        config.architectures = newer.get("architectures")
        found[family] = json.loads(config.to_json_string()) | {"torch_dtype": "bfloat16"}
    Path(target).write_text(json.dumps(found, sort_keys=True, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
