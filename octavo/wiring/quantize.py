"""Puts a quantisation together: the model, its calibration texts, where it goes; and runs it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.kv import BLOCK_SIZE
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader, sensitive_weights
from octavo.checkpoint.writing.destination import Destination, GgufDirectory, HfDirectory
from octavo.checkpoint_ports import Checkpoint, TokenizerSource
from octavo.errors import ConfigError, UnsupportedModel
from octavo.models.registry import build_programs
from octavo.program.program import Program, Weight
from octavo.progress import Report
from octavo.quant.making.recipe import Recipe
from octavo.text.tokenizer import load_tokenizer
from octavo.text.vocabulary import build_tokenizer
from octavo.version import __version__
from octavo.wiring.gguf_outline import gguf_outline
from octavo.worker.quantizing.journal import Journal
from octavo.worker.quantizing.quantizer import Quantizer, plan_matrices
from octavo.worker.quantizing.targets import chosen_ops, matrices_of

WIDE_BITS = 8
GROUPS = (128, 64, 32, 16)
"""Sizes of groups that are usual."""
CLASS_NAMES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Classes that other engines know a model by, for models whose source does not name one."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Texts over which a model is run, and how much of them."""

    text: Path
    num_texts: int
    length: int
    """Tokens of each text."""
    tokenizer: str | None = None
    """Another model whose tokenizer reads the texts; None for the model's own."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model that was quantised."""

    output: Path
    num_matrices: int
    left: tuple[str, ...]
    """Modules of linears that stayed floats."""
    fell_back: tuple[str, ...]
    """Experts that no calibration token reached, which were rounded to nearest."""
    num_bytes: int
    source_bytes: int


def quantize_model(
    model: str, recipe: Recipe, output: Path, calibration: CalibrationText | None, report: Report
) -> Quantized:
    """Quantises a model into a new directory; raises SetupError before anything is computed where
    it cannot be done.
    """
    checkpoint = open_checkpoint(resolve(model, progress=True))
    if calibration is None and recipe.needs_calibration:
        raise ConfigError(
            f"calibration: {recipe.method} needs a text",
            hint="name a file of text like the model's use with --calibration",
        )
    token_ids = None if calibration is None else calibration_ids(checkpoint, calibration)
    return quantize_checkpoint(checkpoint, recipe, output, token_ids, report)


def quantize_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    token_ids: NDArray[np.int32] | None,
    report: Report,
) -> Quantized:
    """Quantises an opened model over calibration texts `[texts, length]`."""
    program = _program(checkpoint)
    if recipe.output_format != "gguf" and recipe.group:
        _check_group(program, checkpoint, recipe.group)
    destination = _destination(checkpoint, recipe, program)
    plan = plan_matrices(program, checkpoint, destination, _bits(program, recipe))
    journal = Journal(output, _identity(checkpoint, recipe, token_ids))
    try:
        destination.begin(list(plan.matrices.values()), journal.folder, keeps=journal.goes_on)
    except ConfigError:
        journal.discard()
        raise
    if not journal.goes_on:
        journal.note()
    load = WeightReader(checkpoint).load
    quantizer = Quantizer(
        program=program,
        checkpoint=checkpoint,
        load=load,
        recipe=recipe,
        destination=destination,
        plan=plan,
        journal=journal,
    )
    if token_ids is None:
        quantizer.run_plain()
    else:
        tokens = f"{token_ids.size:,} calibration tokens"
        report(f"{recipe.method}: {len(plan.matrices)} matrices, {tokens}")
        quantizer.run(token_ids, report)
    destination.finish(plan.left)
    journal.finish()
    return Quantized(
        output,
        num_matrices=len(plan.matrices),
        left=plan.left,
        fell_back=tuple(journal.listed),
        num_bytes=sum(file.stat().st_size for file in output.iterdir()),
        source_bytes=sum(file.stat().st_size for file in checkpoint.weight_files),
    )


def _program(checkpoint: Checkpoint) -> Program:
    """Builds the Program whose matrices are quantised."""
    programs = build_programs(checkpoint.config, every_key=checkpoint.has_config_file)
    program = programs.get("decoder") or programs.get("encoder")
    if program is None or len(programs) > 1:
        raise UnsupportedModel(
            f"{checkpoint.path}: models of an encoder and a decoder are not quantised"
        )
    check_tensors(checkpoint, [program])
    return program


def _check_group(program: Program, checkpoint: Checkpoint, group: int) -> None:
    """Raises ConfigError where a group does not divide the inputs of every matrix."""
    widths = {
        weight.name: weight.shape[-1]
        for op in chosen_ops(program)
        for weight in matrices_of(op)
        if checkpoint.output_major or not weight.transposed
    }
    missed = next((name for name, width in widths.items() if width % group), None)
    if missed is None:
        return
    common = math.gcd(*widths.values())
    fitting = [size for size in GROUPS if common % size == 0]
    raise ConfigError(
        f"group: {group} does not divide the {widths[missed]} inputs of {missed}",
        hint=f"--group {' or '.join(map(str, fitting))} divides all matrices"
        if fitting
        else "use --group -1, whole rows",
    )


def calibration_ids(checkpoint: Checkpoint, calibration: CalibrationText) -> NDArray[np.int32]:
    """Returns texts of equal length, spread over a file: `[texts, length]`."""
    source = (
        open_checkpoint(resolve(calibration.tokenizer, progress=True)).tokenizer_source()
        if calibration.tokenizer is not None
        else checkpoint.tokenizer_source()
    )
    if source is None:
        raise ConfigError(
            f"tokenizer: {checkpoint.path} holds none", hint="name a model that does: --tokenizer"
        )
    length = calibration.length
    if length < BLOCK_SIZE or length % BLOCK_SIZE:
        raise ConfigError(
            f"calibration-length: got {length}, allowed are multiples of {BLOCK_SIZE}"
        )
    try:
        text = calibration.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration: {calibration.text} cannot be read: {error}") from None
    ids = load_tokenizer(source).encode(text, add_special_tokens=False)
    num_texts = min(calibration.num_texts, len(ids) // length)
    if num_texts < 1:
        raise ConfigError(
            f"calibration: {calibration.text} has {len(ids)} tokens, needed are at least {length}",
            hint="take a longer text, or a smaller --calibration-length",
        )
    starts = np.linspace(0, len(ids) - length, num_texts).astype(int)
    return np.stack([np.array(ids[start : start + length], np.int32) for start in starts])


def _destination(checkpoint: Checkpoint, recipe: Recipe, program: Program) -> Destination:
    if recipe.output_format == "gguf":
        if isinstance(checkpoint, GgufCheckpoint):
            return GgufDirectory(checkpoint, recipe)
        return GgufDirectory(gguf_outline(checkpoint, program), recipe, checkpoint)
    model_type = str(checkpoint.config.get("model_type"))
    return HfDirectory(
        checkpoint, recipe, _tokenizer_writer(checkpoint), CLASS_NAMES.get(model_type)
    )


def _tokenizer_writer(checkpoint: Checkpoint) -> Callable[[Path], None]:
    """Returns what writes the files of a tokenizer that the source holds in another form."""

    def write(folder: Path) -> None:
        source = checkpoint.tokenizer_source()
        if source is not None and source.vocabulary is not None:
            write_tokenizer(source, folder)

    return write


def write_tokenizer(source: TokenizerSource, folder: Path) -> None:
    """Writes the tokenizer's files of a source that holds a vocabulary, as GGUF files do."""
    assert source.vocabulary is not None
    built = build_tokenizer(source.vocabulary, source.origin)
    built.tokenizer.save(str(folder / "tokenizer.json"))
    adds_bos = source.add_bos_token if source.add_bos_token is not None else built.adds_bos
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(adds_bos),
        **source.special_tokens,
    }
    if source.chat_template is not None:
        settings["chat_template"] = source.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _bits(program: Program, recipe: Recipe) -> Callable[[Weight], int]:
    sensitive = (
        {weight.name for weight in sensitive_weights(program)} if recipe.keeps_sensitive else set()
    )
    return lambda weight: WIDE_BITS if weight.name in sensitive else recipe.bits


def _identity(
    checkpoint: Checkpoint, recipe: Recipe, token_ids: NDArray[np.int32] | None
) -> dict[str, Any]:
    """Returns what an interrupted run must have in common with the one that goes on."""
    files = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for file in checkpoint.weight_files
    ]
    digest = "" if token_ids is None else hashlib.blake2b(token_ids.tobytes()).hexdigest()
    return {
        "octavo": __version__,
        "model": files,
        "options": asdict(recipe),
        "calibration": digest,
    }
