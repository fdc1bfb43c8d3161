"""What `octavo quantize` writes beside the weights, where it may write, and that a run that is
killed at any place comes to the same files.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.api.errors import ConfigError, WeightMismatch
from octavo.checkpoint.gguf.gguf_families import FAMILIES
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.writing.class_names import CLASS_NAMES
from octavo.cli.quantize import make_recipe
from octavo.quant.making.recipe import Recipe
from octavo.tools.quantize import (
    CalibrationText,
    Quantized,
    calibration_ids,
    quantize_checkpoint,
)
from octavo.worker.quantizing.journal import JOURNAL, Journal
from tests.support.paged_runner import PagedRunner
from tests.support.tiers import examples
from tests.support.tiny_encoders import save_encoder
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96}
TEXTS = np.random.default_rng(5).integers(0, 250, (2, 32)).astype(np.int32)
IDS = np.random.default_rng(9).integers(0, 250, 24)


def recipe(method: str = "rtn", output_format: str = "compressed-tensors", **knobs: Any) -> Recipe:
    usual: dict[str, Any] = {"bits": None, "group": 32, "scheme": None, "sym": None}
    usual |= {"desc_act": False, "damp_percent": 1.0, "keep_sensitive": False}
    return make_recipe(method=method, output_format=output_format, **(usual | knobs))


def quantize(path: Path, output: Path, chosen: Recipe) -> Quantized:
    texts = TEXTS if chosen.needs_calibration else None
    return quantize_checkpoint(open_checkpoint(path), chosen, output, texts, lambda text: None)


def distance(path: Path, other: Path) -> float:
    """Returns the relative distance of two models' logits."""
    first, second = (PagedRunner(each).logits(IDS) for each in (path, other))
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


# -- files beside the weights ----------------------------------------------------------------------


@pytest.mark.parametrize("output_format", ["gptq", "awq", "compressed-tensors"])
def test_the_config_is_the_sources_own(tmp_path: Path, output_format: str) -> None:
    """A null stays one: Mistral's window of null is none, and a missing one is of 4,096 tokens."""
    source = tiny_model("mistral", **SIZES, sliding_window=None).path
    wanted = json.loads((source / "config.json").read_text())
    assert wanted["sliding_window"] is None
    quantize(source, tmp_path / "out", recipe(output_format=output_format))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found.pop("quantization_config")["quant_method"] == output_format
    assert found == wanted


def test_classes_are_those_of_transformers() -> None:
    """A GGUF file does not say `architectures`, which vLLM reads."""
    every = {
        one.model_type
        for family in FAMILIES.values()
        for one in (family, *(variant for _, variant in family.variants))
    }
    encoders = {"bert", "modernbert", "nomic_bert", "roberta"}
    missing = {"chatglm", "t5"}  # of classes outside of transformers, and not quantised
    assert every - encoders - missing <= CLASS_NAMES.keys()
    for model_type, name in CLASS_NAMES.items():
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == name


def test_a_quantised_source_leaves_nothing_of_its_format(tmp_path: Path) -> None:
    first = tmp_path / "first"
    quantize(tiny_model("llama", **SIZES).path, first, recipe(output_format="gptq"))
    (first / "quantize_config.json").write_text('{"bits": 4}')
    quantize(first, tmp_path / "second", recipe(output_format="awq"))
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert not (tmp_path / "second" / "quantize_config.json").exists()
    names = load_file(tmp_path / "second" / "model.safetensors").keys()
    assert not any(name.endswith("g_idx") for name in names)
    assert distance(tmp_path / "second", first) < 0.5


def test_modules_behind_an_encoder_are_kept(tmp_path: Path) -> None:
    """Without its pooling the new model would make other embeddings."""
    source = save_encoder(tmp_path / "source", "bert")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"large")
    before = open_checkpoint(source).config["pooling"]
    quantize(source, tmp_path / "out", recipe(group=-1))
    assert open_checkpoint(tmp_path / "out").config["pooling"] == before
    assert not (tmp_path / "out" / "onnx").exists()


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_a_model_saved_without_its_prefix(tmp_path: Path, method: str) -> None:
    """Base models name their tensors "layers.0..."; the new ones are named likewise, and once."""
    source = tmp_path / "source"
    tiny = tiny_model("llama", **SIZES, tie_word_embeddings=True)
    shutil.copytree(tiny.path, source)
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, source / "model.safetensors")
    quantize(source, tmp_path / "out", recipe(method, "awq"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(name.startswith("model.") for name in found)
    modules = {name.rpartition(".")[0] for name in found}
    assert modules == {name.rpartition(".")[0] for name in bare}
    assert distance(tmp_path / "out", tiny.path) < 0.7


def test_experts_of_one_tensor_are_quantised_one_by_one(tmp_path: Path) -> None:
    tiny = tiny_model("qwen3_moe", **SIZES, moe_intermediate_size=64)
    fused = tmp_path / "fused"
    tiny.model.save_pretrained(fused, save_original_format=False)
    shutil.copy(tiny.path / "config.json", fused / "config.json")
    found = {}
    for path in (tiny.path, fused):
        quantize(path, tmp_path / f"out-{path.name}", recipe("gptq", "gptq"))
        found[path] = load_file(tmp_path / f"out-{path.name}" / "model.safetensors")
    assert found[fused].keys() == found[tiny.path].keys()
    for name, tensor in found[fused].items():
        assert torch.equal(tensor, found[tiny.path][name]), name


READ_BY_OTHERS: dict[str, dict[str, Any]] = {
    "zeros": {"sym": False},
    "gptq": {"method": "gptq"},
    "wide": {"method": "gptq", "keep_sensitive": True},
    "w8a16": {"scheme": "w8a16", "group": -1},
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", READ_BY_OTHERS)
def test_transformers_reads_the_same_model(tmp_path: Path, name: str, tied: bool) -> None:
    """Its logits in fp32 are within 2e-3 of the reference's: it makes matrices of fp16. It reads
    packed zeros only where it unpacks matrices at load.
    """
    tiny = tiny_model("llama", **SIZES, tie_word_embeddings=tied)
    quantize(tiny.path, tmp_path / "out", recipe(**READ_BY_OTHERS[name]))
    unpacks = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    options = unpacks if name == "zeros" else {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **options)
    with torch.no_grad():
        found = model.eval()(torch.tensor(IDS)[None]).logits[0].numpy()
    wanted = PagedRunner(tmp_path / "out").logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3 * abs(wanted).max())


# -- where it may be written -----------------------------------------------------------------------


def test_a_users_own_directory_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "out.partial"
    own.mkdir()
    (own / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"out\.partial exists, the directory for temporary"):
        quantize(tiny_model("llama", **SIZES).path, tmp_path / "out", recipe())
    assert (own / "thesis.txt").read_text() == "years of work"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"output: .* cannot be written: "):
            quantize(tiny_model("llama", **SIZES).path, output, recipe())
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_disk_cannot_become_the_directory(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match="is a mount point"):
        quantize(tiny_model("llama", **SIZES).path, small_disk, recipe())


def test_room_for_states_is_asked_for_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    room = TEXTS.size * 64 * 8 * 2
    for free, fits in ((room - 1, False), (room, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            quantize(tiny_model("llama", **SIZES).path, tmp_path / "out", recipe("gptq", "gptq"))
            continue
        with pytest.raises(ConfigError, match=r"no room for 64\.0 KiB of states"):
            quantize(tiny_model("llama", **SIZES).path, tmp_path / "out", recipe("gptq", "gptq"))
        assert not list(tmp_path.iterdir())


def test_links_and_empty_directories_become_the_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    quantize(tiny_model("llama", **SIZES).path, tmp_path / "link", recipe())
    assert (tmp_path / "empty" / "config.json").exists()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", {}), pytest.raises(ConfigError, match="another run is writing"):
        Journal(tmp_path / "out", {})
    with Journal(tmp_path / "out", {}) as journal:
        assert not journal.goes_on


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "out", {}) as journal:
        for text in ("", "[]", '{"identity": {}}', "\x00"):
            (journal.folder / JOURNAL).write_text(text)
            with pytest.raises(ConfigError, match="another run"):
                Journal(tmp_path / "out", {})
    for text in ("", "[]", '{"identity": {}}', "\x00"):
        (journal.folder / JOURNAL).write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            Journal(tmp_path / "out", {})


# -- what is read ----------------------------------------------------------------------------------


def test_numbers_beyond_every_scale_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama", **SIZES).path, source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = 1e6
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightMismatch, match=f"{name} has values up to 1e.06, expected"):
        quantize(source, tmp_path / "out", recipe())


@pytest.mark.parametrize(
    ("length", "vocabulary", "message"),
    [
        (512, None, "calibration-length: got 512, .* up to the model's context of 64 tokens"),
        (40, None, "calibration-length: got 40, expected a multiple of 16"),
        (16, 40, "tokenizer: the text has token id .*, expected at most 39"),
    ],
)
def test_texts_that_do_not_suit_the_model(
    tmp_path: Path, length: int, vocabulary: int | None, message: str
) -> None:
    tokenizer = tmp_path / "tokenizer"
    whole = tiny_model("llama", vocab_size=278, max_position_embeddings=64).path
    shutil.copytree(whole, tokenizer)
    save_tiny_tokenizer(tokenizer)
    model = whole if vocabulary is None else tiny_model("llama", vocab_size=vocabulary).path
    text = tmp_path / "text.txt"
    text.write_text("Light moves, and is bent where it meets glass. " * 40)
    chosen = CalibrationText(text, 2, length, str(tokenizer))
    with pytest.raises(ConfigError, match=message):
        calibration_ids(open_checkpoint(model), chosen)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00binary\x80", None])
def test_texts_that_are_none(tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama", vocab_size=278).path, source)
    save_tiny_tokenizer(source)
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=r"calibration: .*text\.txt (cannot be read|has 0 tok)"):
        calibration_ids(open_checkpoint(source), CalibrationText(text, 2, 16))


# -- kills -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a process, which nothing catches."""


class Kills:
    """Counts what is done to files below a folder, and ends the run at one of these places."""

    CHANGES = frozenset(
        ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile", "os.truncate")
    )

    def __init__(self) -> None:
        self.folder = ""
        self.count = 0
        self.at = -1
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        writes = event == "open" and bool(set("wax+") & set(arguments[1] or ""))
        if not writes and event not in self.CHANGES:
            return
        if any(str(each).startswith(self.folder) for each in arguments[:2]):
            self.count += 1
            if self.count == self.at:
                raise Killed

    def run(self, folder: Path, at: int = -1) -> int:
        """Begins to count; returns how much was counted before."""
        before, self.folder, self.count, self.at = self.count, str(folder), 0, at
        return before

    def rest(self) -> int:
        self.folder = ""
        return self.count


@pytest.fixture(scope="module")
def kills() -> Iterator[Kills]:
    found = Kills()
    yield found
    found.rest()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("method", "output_format"),
    [("rtn", "compressed-tensors"), ("gptq", "gptq"), ("awq", "awq"), ("gptq", "gguf")],
)
def test_a_run_that_is_killed_anywhere_comes_to_the_same_files(
    kills: Kills, tmp_path: Path, method: str, output_format: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama", **SIZES, vocab_size=278).path, source)
    save_tiny_tokenizer(source)
    chosen = recipe(method, output_format)
    folder = tmp_path / "whole"
    folder.mkdir()
    kills.run(folder)
    quantize(source, folder / "out", chosen)
    total = kills.rest()
    wanted = {file.name: file.read_bytes() for file in (folder / "out").iterdir()}
    assert total > 20 and (output_format == "gguf" or "tokenizer.json" in wanted)
    draw = random.Random(output_format)
    places = {1, 2, 3, total - 2, total - 1, total}
    places |= set(draw.sample(range(4, total), min(examples(4), total - 4)))
    for place in sorted(places):
        folder = tmp_path / str(place)
        folder.mkdir()
        kills.run(folder, place)
        with pytest.raises(Killed):
            quantize(source, folder / "out", chosen)
        kills.rest()
        if (folder / "out").exists():  # only the journal was left to remove
            with pytest.raises(ConfigError, match="exists"):
                quantize(source, folder / "out", chosen)
        else:
            quantize(source, folder / "out", chosen)
        assert [file.name for file in folder.iterdir()] == ["out"], place
        found = {file.name: file.read_bytes() for file in (folder / "out").iterdir()}
        assert found == wanted, (place, total)


def test_a_file_that_was_copied_in_part_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model("llama", **SIZES).path, source)
    (source / "notes.txt").write_text("words " * 100)

    def halves(origin: Path, target: Path) -> None:
        target.write_bytes(origin.read_bytes()[:50])
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "copyfile", halves)
        quantize(source, tmp_path / "out", recipe())
    quantize(source, tmp_path / "out", recipe())
    assert (tmp_path / "out" / "notes.txt").read_text() == "words " * 100


def test_experts_without_tokens_are_listed_behind_a_kill(kills: Kills, tmp_path: Path) -> None:
    """The list and the state from which a run goes on are of the same place."""
    tiny = tiny_model("qwen3_moe", **SIZES, moe_intermediate_size=64)
    chosen = recipe("gptq", "gptq")
    few = TEXTS[:1, :16]

    def run(folder: Path) -> Quantized:
        checkpoint = open_checkpoint(tiny.path)
        return quantize_checkpoint(checkpoint, chosen, folder / "out", few, lambda text: None)

    (tmp_path / "whole").mkdir()
    kills.run(tmp_path / "whole")
    wanted = run(tmp_path / "whole").fell_back
    total = kills.rest()
    assert wanted
    for place in random.Random(1).sample(range(2, total - 4), examples(4)):
        folder = tmp_path / str(place)
        folder.mkdir()
        kills.run(folder, place)
        with pytest.raises(Killed):
            run(folder)
        kills.rest()
        assert run(folder).fell_back == wanted, place
