"""A GGUF file as a Checkpoint: config, tensors and tokenizer in the names and row orders of the
family's safetensors.

Joins `gguf.py` (bytes) and `gguf_families.py` (names); knows nothing of Programs or backends.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.gguf import read_gguf_model
from octavo.checkpoint.gguf_families import FAMILIES
from octavo.checkpoint.gguf_family import Family, Header
from octavo.checkpoint_ports import StoredTensor, TokenizerSource, Vocabulary
from octavo.errors import UnsupportedModel, WeightMismatch
from octavo.quant.blocks import StoredWeight
from octavo.quant.packed import PackedWeight

IGNORED_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Names of tensors that are no weights: they are read into the config."""

CONTROL = 3
"""Token type of control tokens, which no text spells."""

END_OF_TURN = (b"<|im_end|>", b"<end_of_turn>", b"<|eot_id|>", b"<|end|>", b"<|eom_id|>")
"""Texts of control tokens that end an answer even where a header names no eot_token_id; llama.cpp
finds them by text too.
"""

SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class TensorPlace(NamedTuple):
    """A tensor of the file, or one of the matrices stacked in it."""

    tensor: str
    expert: int | None = None


class GgufCheckpoint:
    """One `.gguf` file, or several of one model. Implements `checkpoint_ports.Checkpoint`."""

    output_major = True
    has_config_file = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = read_gguf_model(path)
        self.weight_files: Sequence[Path] = [part.path for part in self.file.files]
        architecture = self.file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise UnsupportedModel(
                f"{path}: architecture {architecture!r}, supported in GGUF are"
                f" {', '.join(FAMILIES)}"
            )
        self.architecture: str = architecture
        self._header = Header(self.file, architecture)
        self._family: Family = FAMILIES[architecture].of(self._header)
        self._gguf_names = self._names()
        self._eos_ids = self._end_ids()
        self.config: dict[str, Any] = self._config()
        self.generation_config: dict[str, Any] = self._generation_config()

    def names(self) -> Collection[str]:
        return self._gguf_names.keys()

    def format_of(self, name: str) -> str:
        return self.file.tensors[self.place(name).tensor].kind.form

    def tensor(self, name: str) -> StoredWeight:
        source, expert = self.place(name)
        packed = self.file.tensor(source, expert)
        if expert is not None:
            return packed
        stem = _stem(source)
        if stem in self._family.restored:
            shape, numbers = self._family.restored[stem]
            restored = numbers(packed.dequantize()).reshape(shape(packed.shape))
            return PackedWeight.plain(restored)
        if stem in self._family.row_orders:
            packed = packed.rows(self._row_order(stem, packed.shape[0]))
        if self._family.norm_offset and source.endswith("norm.weight"):
            packed = PackedWeight.plain(packed.dequantize() - np.float32(self._family.norm_offset))
        return packed

    def stored(self, name: str) -> StoredTensor:
        source, expert = self.place(name)
        shape = self.file.tensors[source].shape
        if (restored := self._family.restored.get(_stem(source))) is not None:
            shape = restored.shape(shape)
        part = self.file.files[self.file.tensors[source].part]
        return StoredTensor(name, shape if expert is None else shape[1:], part.path)

    def release(self) -> None:
        for part in self.file.files:
            part.mapped.madvise(mmap.MADV_DONTNEED)

    def in_file_order(self, name: str, rows: NDArray) -> NDArray:
        """Returns a tensor's rows, given in the family's order, as the file has them."""
        stem = _stem(self.place(name).tensor)
        if stem not in self._family.row_orders:
            return rows
        ordered: NDArray = rows[np.argsort(self._row_order(stem, len(rows)))]
        return ordered

    def in_file_numbers(self, name: str, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns a vector's numbers as the file has them, which adds 1 to some norms' weights."""
        return vector + np.float32(self._family.norm_offset) if self.is_moved(name) else vector

    def is_moved(self, name: str) -> bool:
        """Whether a tensor's numbers in the file are others than the family's."""
        return bool(self._family.norm_offset) and self.place(name).tensor.endswith("norm.weight")

    def names_in(self, tensor: str) -> list[str]:
        """Returns the names of what a tensor of the file holds: its own, or those of its experts'
        matrices.
        """
        return [name for name, place in self._gguf_names.items() if place.tensor == tensor]

    def place(self, name: str) -> TensorPlace:
        """Returns where a tensor lies in the file."""
        source = self._gguf_names.get(name)
        if source is None:
            raise WeightMismatch(f"{self.path}: the tensor {name} is missing")
        return source

    def tokenizer_source(self) -> TokenizerSource | None:
        tokens = self._get("tokenizer.ggml.tokens", list, [])
        if not tokens:
            return None
        vocabulary = Vocabulary(
            model=self._get("tokenizer.ggml.model", str, ""),
            pre=self._get("tokenizer.ggml.pre", str, "default"),
            tokens=tokens,
            types=self._numbers("tokenizer.ggml.token_type"),
            merges=self._get("tokenizer.ggml.merges", list, ()),
            scores=self._numbers("tokenizer.ggml.scores"),
            add_space_prefix=self._get("tokenizer.ggml.add_space_prefix", bool, True),
        )
        return TokenizerSource(
            origin=self.path,
            vocabulary=vocabulary,
            special_tokens=self._special_tokens(tokens),
            eos_token_ids=self._eos_ids,
            add_bos_token=self._get("tokenizer.ggml.add_bos_token", bool, None),
            chat_template=self._get("tokenizer.chat_template", str, None),
        )

    def _names(self) -> dict[str, TensorPlace]:
        """Maps safetensors names to tensors of the file; refuses one that the family does not know,
        which would otherwise be left out of the computation.
        """
        found: dict[str, TensorPlace] = {}
        for source, entry in self.file.tensors.items():
            if source in IGNORED_TENSORS:
                continue
            name = self._family.name(source)
            if name is None:
                raise UnsupportedModel(
                    f"{self.path}: the tensor {source} is unknown in the family"
                    f" {self._family.model_type}"
                )
            if "{}" in name and len(entry.shape) > 2:
                found |= {name.format(e): TensorPlace(source, e) for e in range(entry.shape[0])}
            else:
                found[name.replace(".{}", "")] = TensorPlace(source)
        return found

    def _row_order(self, stem: str, num_rows: int) -> NDArray[np.intp]:
        """Returns for each row in the family's order the row of the file that holds it."""
        try:
            return self._family.row_orders[stem](self.config, num_rows)
        except WeightMismatch as fault:
            raise WeightMismatch(f"{self.path}: {stem} has {fault}") from None

    def _config(self) -> dict[str, Any]:
        metadata, tensors = self.file.metadata, self.file.tensors
        if "token_embd.weight" not in tensors:
            raise WeightMismatch(f"{self.path}: the tensor token_embd.weight is missing")
        return {
            "model_type": self._family.model_type,
            **self._family.config(self._header),
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "dtype": self._dtype(),
        }

    def _dtype(self) -> str:
        """Returns the dtype of the matrices where they are plain floats, else float32."""
        kinds = {entry.kind.name for entry in self.file.tensors.values() if len(entry.shape) > 1}
        return (
            {"BF16": "bfloat16", "F16": "float16"}.get(next(iter(kinds)), "float32")
            if len(kinds) == 1
            else "float32"
        )

    def _generation_config(self) -> dict[str, Any]:
        found = {
            name: self._get(f"general.sampling.{key}", (int, float), None)
            for key, name in SAMPLING_KEYS.items()
        }
        found = {name: value for name, value in found.items() if value is not None}
        if "temperature" in found:
            found["do_sample"] = found["temperature"] > 0
        return found | {
            "bos_token_id": self.config["bos_token_id"],
            "eos_token_id": list(self._eos_ids),
        }

    def _end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end an answer: eos, eot, eom, and control tokens known by their
        text.
        """
        found = [
            self._get(f"tokenizer.ggml.{kind}_token_id", int, None)
            for kind in ("eos", "eot", "eom")
        ]
        tokens = self._get("tokenizer.ggml.tokens", list, [])
        control = np.flatnonzero(
            np.asarray(self._get("tokenizer.ggml.token_type", np.ndarray, ())) == CONTROL
        )
        found += [int(i) for i in control if i < len(tokens) and tokens[i] in END_OF_TURN]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Returns a metadata value of the given types, or the default where the key is missing."""
        value = self.file.metadata.get(key)
        if value is not None and not isinstance(value, kind):
            allowed = " or ".join(
                one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))
            )
            raise WeightMismatch(
                f"{self.path}: {key} is a {type(value).__name__}, allowed is {allowed}"
            )
        return default if value is None else value

    def _numbers(self, key: str) -> list[Any]:
        """Returns one Python number for each token; empty where the key is missing.

        Loops read Python's numbers several times as fast as NumPy's.
        """
        found: NDArray | tuple[()] = self._get(key, np.ndarray, ())
        return found.tolist() if isinstance(found, np.ndarray) else []

    def _special_tokens(self, tokens: list[bytes]) -> dict[str, str]:
        metadata = self.file.metadata
        ids = {
            f"{ours}_token": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in _SPECIAL_IDS.items()
        }
        return {
            name: tokens[i].decode(errors="replace")
            for name, i in ids.items()
            if isinstance(i, int) and 0 <= i < len(tokens)
        }


_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _stem(source: str) -> str:
    """Returns the stem of a tensor's name: "attn_q" of "blk.0.attn_q.weight", "ssm_a" of
    "blk.0.ssm_a".
    """
    parts = source.removesuffix(".weight").removesuffix(".bias").split(".")
    return parts[-1]
