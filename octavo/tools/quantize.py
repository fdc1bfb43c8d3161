"""Quantizes a model to files: model, calibration texts, output directory."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError, SetupError, UnsupportedModel
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.ports import Checkpoint, TokenizerSource
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader, sensitive_weights
from octavo.checkpoint.writing.class_names import CLASS_NAMES
from octavo.checkpoint.writing.destination import Destination, GgufDirectory, HfDirectory
from octavo.config.sizes import format_bytes
from octavo.executor.kv import BLOCK_SIZE
from octavo.models.hf_config import model_info
from octavo.models.registry import build_programs
from octavo.program.ops import Embedding
from octavo.program.program import Program, Weight
from octavo.quant.making.recipe import Recipe
from octavo.text.tokenizer import load_tokenizer
from octavo.text.vocabulary import build_tokenizer
from octavo.utils.progress import Report
from octavo.utils.version import __version__
from octavo.wiring.gguf_outline import gguf_outline
from octavo.worker.quantizing.journal import Journal, writing_to
from octavo.worker.quantizing.quantizer import QuantizePlan, Quantizer, plan_matrices
from octavo.worker.quantizing.targets import chosen_ops, get_matrices

WIDE_BITS = 8
GROUPS = (128, 64, 32, 16)
"""Usual group sizes."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    text: Path
    num_texts: int
    length: int
    """Number of tokens of each text."""
    tokenizer: str | None = None
    """Model whose tokenizer encodes the texts; None: the model's own."""


@dataclass(frozen=True, slots=True)
class Quantized:
    output: Path
    num_matrices: int
    left: tuple[str, ...]
    """Modules of linears that were not quantized."""
    fell_back: tuple[str, ...]
    """Experts to which no calibration token was routed; their weights were rounded to nearest."""
    num_bytes: int
    source_bytes: int


def quantize_model(
    model: str, recipe: Recipe, output: Path, calibration: CalibrationText | None, report: Report
) -> Quantized:
    """Quantizes a model into a new directory. Raises SetupError before computing anything if it is
    not possible.
    """
    if calibration is None and recipe.needs_calibration:
        raise ConfigError(
            f"calibration: {recipe.method} requires a text",
            hint=f"octavo quantize {model} -o {output} --method {recipe.method} --calibration"
            " TEXT (a file similar to the model's prompts), or use --method rtn",
        )
    checkpoint = open_checkpoint(resolve(model, progress=True))
    token_ids = None if calibration is None else calibration_ids(checkpoint, calibration)
    return quantize_checkpoint(checkpoint, recipe, output, token_ids, report)


def quantize_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    token_ids: NDArray[np.int32] | None,
    report: Report,
) -> Quantized:
    """Quantizes an opened model with calibration tokens `[texts, length]`."""
    program = _program(checkpoint)
    recipe = _with_group(recipe, program, checkpoint, report)
    destination = _destination(checkpoint, recipe, program)
    plan = plan_matrices(program, checkpoint, destination, _bits(program, recipe))
    identity = _identity(checkpoint, recipe, token_ids)
    with Journal(output, identity) as journal, writing_to(journal.folder):
        _begin(destination, plan, journal, _state_bytes(program, recipe, token_ids))
        if (warning := _describe_larger(checkpoint, journal.folder)) is not None:
            report(warning)
        quantizer = Quantizer(
            program=program,
            checkpoint=checkpoint,
            load=WeightReader(checkpoint).load,
            recipe=recipe,
            destination=destination,
            plan=plan,
            journal=journal,
        )
        if token_ids is None:
            quantizer.run_plain(report)
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
        num_bytes=_folder_bytes(output),
        source_bytes=_weight_bytes(checkpoint),
    )


def _describe_larger(checkpoint: Checkpoint, folder: Path) -> str | None:
    """Returns a warning if the result is not smaller than its source."""
    num_bytes, source = _folder_bytes(folder), _weight_bytes(checkpoint)
    if num_bytes < source:
        return None
    return (
        f"WARNING: the result has {format_bytes(num_bytes)},"
        f" the source only {format_bytes(source)}: its weights are quantized"
        " already; quantize the original model instead"
    )


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _weight_bytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.weight_files)


def _begin(
    destination: Destination, plan: QuantizePlan, journal: Journal, state_bytes: int
) -> None:
    """Reserves disk space and writes the unquantized files, unless a resumed run already has.
    Removes everything if there is not enough space.
    """
    try:
        destination.begin(list(plan.matrices.values()), journal.folder, keeps=journal.goes_on)
        journal.check_room(state_bytes)
    except SetupError:
        if not journal.done:
            journal.discard()
        raise
    if not journal.goes_on:
        journal.began()


def _state_bytes(program: Program, recipe: Recipe, token_ids: NDArray[np.int32] | None) -> int:
    """Returns the bytes of a run's state: the residual stream of all tokens."""
    if token_ids is None:
        return 0
    table = next(op for op in program.ops if isinstance(op, Embedding))
    num_runs = 2 if recipe.gptaq else 1
    return num_runs * token_ids.size * table.out.width * np.dtype(np.float64).itemsize


def _program(checkpoint: Checkpoint) -> Program:
    """Builds the Program with the matrices to quantize."""
    programs = build_programs(checkpoint.config, every_key=checkpoint.has_config_file)
    program = programs.get("decoder") or programs.get("encoder")
    if program is None or len(programs) > 1:
        raise UnsupportedModel(
            f"{checkpoint.path}: encoder-decoder models cannot be quantized to files",
            hint="use octavo serve --quantization int8, which quantizes the weights while loading",
        )
    check_tensors(checkpoint, [program])
    return program


def _with_group(recipe: Recipe, program: Program, checkpoint: Checkpoint, report: Report) -> Recipe:
    """Returns the recipe with a group size that divides the inputs of every matrix; chooses one if
    none is given. Raises ConfigError if the given group size does not.
    """
    if recipe.output_format == "gguf" or recipe.group == 0:
        return replace(recipe, group=recipe.group or 0)
    widths = {
        weight.name: weight.shape[-1]
        for op in chosen_ops(program)
        for weight in get_matrices(op)
        if checkpoint.output_major or not weight.transposed
    }
    common = math.gcd(*widths.values())
    fitting = [size for size in GROUPS if common % size == 0]
    if recipe.group is None:
        group = fitting[0] if fitting else 0
        if group != GROUPS[0]:
            shown = f"groups of {group} inputs" if group else "whole rows"
            report(f"one scale for {shown}: groups of {GROUPS[0]} do not divide every matrix")
        return replace(recipe, group=group)
    missed = next((name for name, width in widths.items() if width % recipe.group), None)
    if missed is None:
        return recipe
    raise ConfigError(
        f"group: {recipe.group} does not divide the {widths[missed]} inputs of {missed}",
        hint=f"--group {' or '.join(map(str, fitting))} divides all matrices"
        if fitting
        else "use --group -1 (whole rows)",
    )


def calibration_ids(checkpoint: Checkpoint, calibration: CalibrationText) -> NDArray[np.int32]:
    """Returns tokens of equally long texts, spread over the file: `[texts, length]`."""
    source = (
        open_checkpoint(resolve(calibration.tokenizer, progress=True)).tokenizer_source()
        if calibration.tokenizer is not None
        else checkpoint.tokenizer_source()
    )
    if source is None:
        raise ConfigError(
            f"tokenizer: {checkpoint.path} has no tokenizer",
            hint="set another one with --tokenizer",
        )
    length = calibration.length
    info = model_info(checkpoint.config, checkpoint.generation_config)
    if length < BLOCK_SIZE or length % BLOCK_SIZE or length > info.max_context_tokens:
        raise ConfigError(
            f"calibration-length: got {length}, expected a multiple of {BLOCK_SIZE} up to the"
            f" model's context of {info.max_context_tokens} tokens"
        )
    try:
        text = calibration.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"calibration: {calibration.text} cannot be read: {reason}") from None
    ids = load_tokenizer(source).encode(text, add_special_tokens=False)
    num_texts = min(calibration.num_texts, len(ids) // length)
    if num_texts < 1:
        raise ConfigError(
            f"calibration: {calibration.text} has {len(ids)} tokens, expected at least {length}",
            hint="use a longer text, or a smaller --calibration-length",
        )
    if max(ids) >= info.vocab_size:
        raise ConfigError(
            f"tokenizer: the text has token id {max(ids)}, expected at most"
            f" {info.vocab_size - 1}, the vocabulary of {checkpoint.path}",
            hint="set a tokenizer with the same vocabulary: --tokenizer",
        )
    starts = np.linspace(0, len(ids) - length, num_texts).astype(int)
    return np.stack([np.array(ids[start : start + length], np.int32) for start in starts])


def _destination(checkpoint: Checkpoint, recipe: Recipe, program: Program) -> Destination:
    if recipe.output_format == "gguf":
        if isinstance(checkpoint, GgufCheckpoint):
            return GgufDirectory(checkpoint, recipe)
        with writing_to(Path(tempfile.gettempdir())):
            outline = gguf_outline(checkpoint, program)
        return GgufDirectory(outline, recipe, checkpoint)
    model_type = str(checkpoint.config.get("model_type"))
    return HfDirectory(
        checkpoint, recipe, _tokenizer_writer(checkpoint), CLASS_NAMES.get(model_type)
    )


def _tokenizer_writer(checkpoint: Checkpoint) -> Callable[[Path], None]:
    """Returns a function that writes tokenizer files if the source stores its tokenizer in another
    format.
    """

    def write(folder: Path) -> None:
        source = checkpoint.tokenizer_source()
        if source is not None and source.vocabulary is not None:
            write_tokenizer(source, folder)

    return write


def write_tokenizer(source: TokenizerSource, folder: Path) -> None:
    """Writes the tokenizer files of a source that stores a vocabulary, such as GGUF."""
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
    if source.named_templates:
        templates = {**source.named_templates, "default": source.chat_template}
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
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
    """Returns the properties that must be equal for an interrupted run to be resumed."""
    files = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for file in checkpoint.weight_files
    ]
    digest = "" if token_ids is None else hashlib.blake2b(token_ids.tobytes()).hexdigest()
    config = json.dumps(checkpoint.config, sort_keys=True, default=str)
    return {
        "octavo": __version__,
        "model": files,
        "config": hashlib.blake2b(config.encode()).hexdigest(),
        "options": asdict(recipe),
        "calibration": digest,
    }
