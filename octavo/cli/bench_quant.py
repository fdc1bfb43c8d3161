"""`octavo bench quant MODEL`: compares weight formats by size, tokens/s and perplexity, against
FP16.

Formats that need conversion are quantized into a directory, and results are stored there too, so
that later runs reuse both. Every row runs the same requests and the same text.
"""

from __future__ import annotations

import hashlib
import json as json_format
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from octavo.api.errors import ConfigError
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model
from octavo.cli.quantize import make_recipe
from octavo.config.sizes import format_bytes
from octavo.tools.bench.perplexity import perplexity
from octavo.utils.progress import quiet, to_stderr

if TYPE_CHECKING:
    from octavo.api.llm import LLM
    from octavo.tools.quantize import CalibrationText

FIGURES = "figures.jsonl"
"""File with measured rows, one per line, in the directory of quantized models."""
MADE = "made.json"
"""File in the same directory with a digest of each model's sources."""
INT_FORMATS = {"output_format": "compressed-tensors", "sym": False}


class Variant(NamedTuple):
    """A weight format: options of the engine, or of `octavo quantize`."""

    options: Mapping[str, Any]
    made: Mapping[str, Any] | None = None
    is_gguf: bool = False


VARIANTS: dict[str, Variant] = {
    "FP16": Variant({"dtype": "float16"}),
    "INT8": Variant({"quantization": "int8"}),
    "INT4": Variant({"quantization": "int4"}),
    "RTN": Variant({}, {"method": "rtn", **INT_FORMATS}),
    "GPTQ": Variant({}, {"method": "gptq", "desc_act": True, "output_format": "gptq"}),
    "AWQ": Variant({}, {"method": "awq", "output_format": "awq"}),
    "W8A8": Variant({}, {"method": "smoothquant", "scheme": "w8a8", **INT_FORMATS}),
    "GGUF-4": Variant({}, {"method": "gptq", "output_format": "gguf"}, is_gguf=True),
    "GGUF-6": Variant({}, {"method": "rtn", "bits": 6, "output_format": "gguf"}, is_gguf=True),
    "GGUF-8": Variant({}, {"method": "rtn", "bits": 8, "output_format": "gguf"}, is_gguf=True),
}


@dataclass(frozen=True, slots=True)
class QuantRow:
    """Results for one weight format."""

    name: str
    weight_bytes: int
    tokens_per_s: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class QuantWork:
    """Workload of every row."""

    text: str
    window: int
    num_windows: int | None
    num_prompts: int
    input_len: int
    output_len: int
    rounds: int


@with_engine_flags(without=("model", "dtype", "quantization", "tokenizer", "calibration"))
def quant(
    model: Annotated[
        str, typer.Argument(help="Short name, OWNER/REPO[:QUANT] on Hugging Face, or path.")
    ],
    *,
    text: Annotated[Path, typer.Option(help="Measure the perplexity of this text")],
    calibration: Annotated[
        Path | None, typer.Option(help="Calibrate GPTQ and AWQ with this text")
    ] = None,
    only: Annotated[
        str,
        typer.Option(help="Measure only these formats, e.g. FP16,INT8,GPTQ", show_default="all"),
    ] = "",
    group: Annotated[int, typer.Option(help="Use N inputs per scale")] = 32,
    made: Annotated[
        Path | None, typer.Option(help="Store quantized models in this directory")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Use the tokenizer of this model")] = None,
    window: Annotated[
        int, typer.Option(help="Cut the text into windows of N tokens", min=2)
    ] = 1024,
    windows: Annotated[
        int | None, typer.Option(help="Use N windows", show_default="all", min=1)
    ] = None,
    calibration_texts: Annotated[int, typer.Option(help="Use N calibration samples", min=1)] = 32,
    calibration_length: Annotated[
        int, typer.Option(help="Use calibration samples of N tokens", min=16)
    ] = 512,
    num_prompts: Annotated[int, typer.Option(help="Send N requests per round", min=1)] = 32,
    input_len: Annotated[int, typer.Option(help="Use prompts of N tokens", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Generate N tokens per request", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Run N rounds and report the median", min=1)] = 3,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Quantize into --made and measure nothing")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Reuse results in --made")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object")] = False,
    options: dict[str, Any],
) -> None:
    """Measure size, tokens/s and perplexity of a model in each weight format."""
    if prepare and made is None:
        raise ConfigError("prepare: requires a directory", hint="set one with --made")
    path = str(with_local_model({"model": model})["model"])
    names = _choose_variants(only, path, has_calibration=calibration is not None)
    work = QuantWork(
        _read(text),
        window=window,
        num_windows=windows,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        rounds=rounds,
    )
    own = {"tokenizer": tokenizer} if tokenizer is not None else {}
    texts = _texts(calibration, calibration_texts, calibration_length, tokenizer)
    with _folder(made) as folder:
        figures = _Figures(folder / FIGURES, _digest(path, options, own, group, work))
        known = figures.read() if resume else {}
        for name in names:
            if name in known:
                continue
            variant = VARIANTS[name]
            engine_options = {"model": path, **options, **own, **variant.options}
            if variant.made is not None:
                target = folder / f"{name}-g{group}"
                _make(path, variant.made, group, target, texts)
                engine_options["model"] = str(target)
            if prepare:
                continue
            print(f"measuring {name}", file=sys.stderr)
            known[name] = _measure(name, engine_options, work)
            figures.add(known[name])
    if not prepare:
        _print([known[name] for name in names], json=json)


@dataclass(frozen=True, slots=True)
class _Figures:
    """The results file; each row has a digest of its workload."""

    path: Path
    digest: str

    def read(self) -> dict[str, QuantRow]:
        """Returns the latest rows of this workload, by name; skips truncated lines."""
        if not self.path.exists():
            return {}
        rows = {}
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                digest, row = json_format.loads(line)
                if digest == self.digest:
                    rows[row["name"]] = QuantRow(**row)
            except (ValueError, TypeError, KeyError):
                continue
        return rows

    def add(self, row: QuantRow) -> None:
        """Appends a row; starts a new line in case the last one is truncated."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json_format.dumps([self.digest, asdict(row)]) + "\n")


def _digest(*work: object) -> str:
    """Returns a digest that identifies a workload."""
    return hashlib.blake2b(repr(work).encode(), digest_size=16).hexdigest()


def _choose_variants(only: str, path: str, *, has_calibration: bool) -> list[str]:
    """Returns the rows to measure, FP16 first. GGUF rows are measured for a GGUF file, or if they
    are named.
    """
    requested_names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in requested_names if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"only: got {unknown[0]!r}, expected {', '.join(VARIANTS)}")
    is_gguf = path.endswith(".gguf")
    names = [name for name in VARIANTS if name in requested_names or not requested_names]
    for name in names:
        recipe = VARIANTS[name].made
        if recipe is not None and recipe["method"] != "rtn" and not has_calibration:
            raise ConfigError(
                f"calibration: {name} requires a text",
                hint="set one with --calibration, or exclude the format with --only",
            )
    chosen = [
        name for name in names if is_gguf or name in requested_names or not VARIANTS[name].is_gguf
    ]
    return chosen if "FP16" in chosen else ["FP16", *chosen]


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text: {text} cannot be read: {error}") from None


@contextmanager
def _folder(target_folder: Path | None) -> Iterator[Path]:
    """Yields the directory for quantized models; a temporary one if none is given."""
    if target_folder is not None:
        try:
            target_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"made: {target_folder} cannot be created: {error.strerror}"
            ) from None
        yield target_folder
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _texts(
    calibration: Path | None, num_texts: int, length: int, tokenizer: str | None
) -> CalibrationText | None:
    from octavo.tools.quantize import CalibrationText

    if calibration is None:
        return None
    return CalibrationText(calibration, num_texts, length, tokenizer)


def _make(
    path: str,
    made: Mapping[str, Any],
    group: int,
    target: Path,
    texts: CalibrationText | None,
) -> None:
    """Quantizes the model, unless an earlier run already has."""
    from octavo.tools.quantize import quantize_model

    read = None if texts is None else replace(texts, text=texts.text.resolve())
    _store_digest(target, _digest(Path(path).resolve(), sorted(made.items()), group, read))
    if target.exists():
        return
    knobs: dict[str, Any] = {
        "bits": None,
        "group": group,
        "scheme": None,
        "sym": False,
        "desc_act": False,
        "damp_percent": 5.0,
        "keep_sensitive": False,
    }
    quantize_model(path, make_recipe(**{**knobs, **made}), target, texts, to_stderr)


def _store_digest(target: Path, digest: str) -> None:
    """Stores a digest of a quantized model's sources beside it; raises ConfigError if it was made
    from others.
    """
    from octavo.checkpoint.json_file import read_json_if_there

    file = target.with_name(MADE)
    known = read_json_if_there(file)
    if target.exists() and known.get(target.name, digest) != digest:
        raise ConfigError(
            f"made: {target} was quantized from another model or with another text",
            hint="set another directory with --made, or delete this one",
        )
    file.write_text(json_format.dumps(known | {target.name: digest}), encoding="utf-8")


def _measure(name: str, options: dict[str, Any], work: QuantWork) -> QuantRow:
    from octavo.api.llm import LLM
    from octavo.wiring.weight_size import weight_bytes

    size = weight_bytes(options)
    with LLM(**options, enable_prefix_caching=False, report=quiet) as llm:
        result = perplexity(llm, work.text, work.window, work.num_windows)
        rates = [_rate(llm, work) for _ in range(work.rounds)]
    return QuantRow(name, size, statistics.median(rates), result)


def _rate(llm: LLM, work: QuantWork) -> float:
    """Returns the tokens/s (prompt and output) of one round."""
    import random
    import time

    from octavo.api.sampling_params import SamplingParams

    draw = random.Random(0)
    size = llm.info.vocab_size
    prompts = [
        [draw.randrange(size) for _ in range(work.input_len)] for _ in range(work.num_prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    tokens = work.num_prompts * (work.input_len + work.output_len)
    return tokens / (time.perf_counter() - began)


def _print(rows: Sequence[QuantRow], *, json: bool) -> None:
    first = rows[0]
    if json:
        print(json_format.dumps({"rows": [asdict(row) for row in rows]}))
        return
    print(f"{'':8}{'weights':>12}{'':>7}{'tokens/s':>10}{'':>8}{'perplexity':>12}{'':>8}")
    for row in rows:
        size, speed = row.weight_bytes / first.weight_bytes, row.tokens_per_s / first.tokens_per_s
        rise = row.perplexity / first.perplexity - 1
        print(
            f"{row.name:8}{format_bytes(row.weight_bytes):>12}{size:>7.0%}"
            f"{row.tokens_per_s:>10.1f}{speed:>7.2f}x{row.perplexity:>12.4f}{rise:>+8.1%}"
        )
