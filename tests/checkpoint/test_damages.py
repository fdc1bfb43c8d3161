"""Seeded damages of whole models, file by file: each loads, or is refused by one SetupError that
names what is wrong, and nothing else happens.
"""

import contextlib
import json
import random
import shutil
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.api.errors import SetupError
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader
from octavo.models.hf_config import model_info
from octavo.models.registry import build_programs
from octavo.quant.making.recipe import Recipe
from octavo.tools.quantize import quantize_checkpoint
from octavo.utils.progress import quiet
from tests.checkpoint import test_bitsandbytes, test_compressed_tensors, test_mxfp4
from tests.support.fp8_checkpoints import in_fp8
from tests.support.gguf_conversion import convert
from tests.support.quantized_checkpoints import write_quantized
from tests.support.tiers import examples
from tests.support.tiny_gguf import tiny_model as gguf_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

STRANGE = (None, True, -1, 0, 3, 1 << 40, 1e300, float("nan"), "", "x", [], [1, "a"], {}, {"a": 1})
NUM_BYTES_OF_HEADER = 3000
QUANTIZED = {
    "gptq": {"output_format": "gptq", "symmetric": False},
    "awq": {"output_format": "awq", "symmetric": False},
    "packed": {"output_format": "compressed-tensors", "symmetric": False},
    "packed-sym": {"output_format": "compressed-tensors", "symmetric": True},
}
"""Recipes of quantised models, by name."""


OF_OTHERS = {
    "fp8": lambda folder: in_fp8(tiny_model("llama"), folder, "channel"),
    "fp8-blocks": lambda folder: in_fp8(tiny_model("deepseek_v3"), folder, "powers"),
    "gptq-order": lambda folder: write_quantized(small(), folder, "gptq-4-order"),
    "gptq-3": lambda folder: write_quantized(small(), folder, "gptq-3"),
    "awq-gemv": lambda folder: write_quantized(small(), folder, "awq-gemv"),
    "int8": lambda folder: test_compressed_tensors.write(small(), folder, "8 bits"),
    "float8": lambda folder: test_compressed_tensors.write(small(), folder, "fp8"),
    "nvfp4": lambda folder: test_compressed_tensors.write(small(), folder, "nvfp4"),
    "mxfp4": lambda folder: test_compressed_tensors.write(small(), folder, "mxfp4"),
    "gpt-oss": lambda folder: test_mxfp4.write(folder, folder.parent / "gpt-oss-twin"),
    "nf4": lambda folder: test_bitsandbytes.write(folder, "double"),
    "fp4": lambda folder: test_bitsandbytes.write(folder, "fp4"),
    "bnb-int8": lambda folder: test_bitsandbytes.write(folder, "int8"),
}
"""Writers of models in formats that other packages make, by name."""


def small():
    return tiny_model("llama", hidden_size=64, intermediate_size=96)


CONVERTED = {
    "gguf-latents": ("deepseek_v3", {"num_hidden_layers": 2}),
    "gguf-deltas": ("qwen3_5_text", {}),
    "gguf-streams": ("gemma3n_text", {"vocab_size": 320}),
    "gguf-stacks": ("t5", {"num_layers": 2, "num_decoder_layers": 2}),
}
"""Families whose GGUF files need more than names, and their options, by name."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Returns a directory with the GGUF file of a family, made once."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        family, options = CONVERTED[name]
        source = tiny_model(family, **options).path
        (folder / "whole").mkdir()
        convert(source, folder).rename(folder / "whole" / "model.gguf")
        return folder / "whole"

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Whole models by how they are stored."""
    folder = tmp_path_factory.mktemp("whole")
    model = deepcopy(tiny_model("qwen3").model).to(torch.bfloat16)
    model.save_pretrained(folder / "sharded", max_shard_size="60KB")
    (folder / "gguf").mkdir()
    write_tiny_gguf(folder / "gguf" / "model.gguf", "llama", gguf_model("llama"), tokens=96)
    (folder / "parts").mkdir()
    write_tiny_gguf(folder / "parts" / "m.gguf", "llama", gguf_model("llama"), max_tensors=12)
    source = open_checkpoint(tiny_model("llama", hidden_size=64, intermediate_size=96).path)
    for name, options in QUANTIZED.items():
        recipe = Recipe("rtn", bits=4, group=32, **options)
        quantize_checkpoint(source, recipe, folder / name, None, quiet)
    return {
        **{name: folder / name for name in QUANTIZED},
        "parts": folder / "parts",
        "safetensors": Path(tiny_model_with_text()),
        "experts": tiny_model("qwen3_moe").path,
        "sharded": folder / "sharded",
        "gguf": folder / "gguf",
    }


def load(path):
    """Reads all of a model as an engine does."""
    checkpoint = open_checkpoint(path)
    model_info(checkpoint.config, checkpoint.generation_config)
    programs = build_programs(checkpoint.config, every_key=checkpoint.has_config_file).values()
    check_tensors(checkpoint, programs)
    checkpoint.tokenizer_source()
    reader = WeightReader(checkpoint)
    for program in programs:
        for weight in program.weights:
            reader.load(weight)


def damage(folder, draw):
    """Damages one file of a model; returns what was done to it."""
    file = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    if file.suffix == ".json" and draw.random() < 0.8:
        return file, _damage_json(file, draw)
    kind = draw.choice(("gone", "cut", "bytes", "empty"))
    data = bytearray(file.read_bytes())
    if kind == "gone":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif kind == "empty":
        file.write_bytes(b"")
    else:
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(min(len(data), NUM_BYTES_OF_HEADER))] = draw.randrange(256)
        file.write_bytes(data)
    return file, kind


def _damage_json(file, draw):
    """Takes a key away, or puts a strange value in its place, anywhere in the file."""
    found = json.loads(file.read_text())
    place = found
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw.choice(keys)
        below = place[key]
        if not isinstance(below, dict | list) or not below or draw.random() < 0.4:
            break
        place = below
    if draw.random() < 0.4:
        del place[key]
        said = f"without {key}"
    else:
        place[key] = draw.choice(STRANGE)
        said = f"{key} = {place[key]!r}"
    file.write_text(json.dumps(found))
    return said


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    "stored", ["safetensors", "experts", "sharded", "gguf", "parts", *QUANTIZED]
)
def test_a_damaged_model_loads_or_is_refused(whole, stored, tmp_path):
    assert num_refused(whole[stored], tmp_path, damage, examples(200)) > examples(200) // 4


@pytest.mark.parametrize("stored", CONVERTED)
def test_a_damaged_file_of_any_family_loads_or_is_refused(converted, stored, tmp_path):
    assert num_refused(converted(stored), tmp_path, damage, examples(20)) > examples(20) // 4


@pytest.mark.parametrize("stored", OF_OTHERS)
def test_damages_of_formats_that_others_write(stored, tmp_path):
    """Damages of files, and of a tensor inside a file that is whole, which is named."""
    path = tmp_path / stored
    OF_OTHERS[stored](path)
    refused = num_refused(path, tmp_path / "files", damage, examples(5))
    refused += num_refused(path, tmp_path / "tensors", damage_tensor, examples(15))
    assert refused > examples(20) // 5


def damage_tensor(folder, draw):
    """Takes a tensor away, or gives it another type, shape or other bytes."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    quantized = [name for name in sorted(tensors) if "proj" in name]
    name = draw.choice(quantized)
    found = tensors[name]
    kind = draw.choice(("gone", "cut", "turned", "type", "bytes", "flat", "ones"))
    if kind == "gone":
        del tensors[name]
    elif kind == "bytes":
        raw = torch.tensor(list(draw.randbytes(found.numel() * found.element_size())))
        tensors[name] = raw.to(torch.uint8).view(found.dtype).reshape(found.shape)
    else:
        tensors[name] = {
            "cut": lambda: found[:-1] if found.ndim else found[None],
            "turned": lambda: found.mT if found.ndim > 1 else found[None],
            "type": lambda: found.to(draw.choice((torch.int32, torch.float16, torch.uint8))),
            "flat": lambda: found.reshape(-1),
            "ones": lambda: torch.ones(3, 2, dtype=torch.int32),
        }[kind]().contiguous()
    save_file(tensors, file)
    return file, f"{name} {kind}"


def num_refused(whole, folder, damaged, count):
    """Loads damaged copies of a model; returns how many are refused."""
    load(whole)
    refused = 0
    for seed in range(count):
        copy = folder / str(seed)
        shutil.copytree(whole, copy)
        file, done = damaged(copy, random.Random(seed))
        try:
            load(copy)
        except SetupError as error:
            refused += 1
            assert len(str(error)) < 2000
            if damaged is damage_tensor:
                assert str(copy) in error.message, error.message
        except BaseException as error:
            raise AssertionError(f"{whole.name} {seed}: {file.name} {done}") from error
        with contextlib.suppress(OSError):
            shutil.rmtree(copy)
    return refused
