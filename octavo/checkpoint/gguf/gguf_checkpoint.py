"""A GGUF file as a Checkpoint, with the config, tensor names and row orders of the family's
safetensors.

Combines `gguf_file.py` (bytes) and `gguf_families.py` (names); does not depend on Programs or
backends.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.gguf.gguf_encoders import pooling_config
from octavo.checkpoint.gguf.gguf_families import FAMILIES
from octavo.checkpoint.gguf.gguf_family import Family, Header, Joined, RowOrder
from octavo.checkpoint.gguf.gguf_file import read_gguf_model
from octavo.checkpoint.ports import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Side,
    StoredTensor,
    TokenizerSource,
    Vocabulary,
)
from octavo.quant.blocks import StoredWeight
from octavo.quant.packed import PackedWeight
from octavo.text.end_tokens import find_control_tokens, find_end_tokens

IGNORED_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Tensors that are not weights; they are read into the config."""

DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
"""Default ids of special tokens by tokenizer model, as in llama.cpp."""

END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Kinds of tokens that end a text, by their names in the header."""

SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "octavo.max_new_tokens": "max_new_tokens",
}
"""Header keys of recommended sampling values, and their names in generation_config. llama.cpp has
no key for the maximum number of tokens; the last one is Octavo's."""
FLOAT32_DIGITS = 7
"""Significant digits of a float32, so that 0.7 is not read as 0.699999988."""


class TensorLocation(NamedTuple):
    """Location of a tensor: a tensor of the file, one of the matrices stacked in it, or several
    tensors.
    """

    tensor: str
    expert: int | None = None
    joined: tuple[str, ...] = ()
    """All tensors that form this one, if it is split; `tensor` is the first."""


class GgufCheckpoint:
    """A model in one or several `.gguf` files. Implements `ports.Checkpoint`."""

    output_major = True
    has_config_file = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = read_gguf_model(path)
        self.weight_files: Sequence[Path] = [part.path for part in self.file.files]
        architecture = self.file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise UnsupportedModel(
                f"{path}: got the architecture {architecture!r}, supported in GGUF:"
                f" {', '.join(FAMILIES)}",
                hint="use the safetensors version of the model, if its family is supported",
            )
        self.architecture: str = architecture
        self._header = Header(self.file, architecture)
        self._family: Family = FAMILIES[architecture].of(self._header)
        self._gguf_names = self._names()
        self.config: dict[str, Any] = self._config()
        self._header.refuse_unread()
        self._eos_ids = self._end_ids()
        self.generation_config: dict[str, Any] = self._generation_config()

    def names(self) -> Collection[str]:
        return self._gguf_names.keys()

    def get_format(self, name: str) -> str:
        location = self.locate(name)
        kinds = [
            self.file.tensors[part_name].kind for part_name in location.joined or (location.tensor,)
        ]
        is_one_type = len({kind.name for kind in kinds}) == 1 and kinds[0].dtype is not None
        return kinds[0].form if not location.joined or is_one_type else "F32"

    def tensor(self, name: str) -> StoredWeight:
        source, expert, parts = self.locate(name)
        if parts:
            return self._joined_tensor(name, parts)
        packed = self.file.tensor(source, expert)
        if expert is not None:
            return packed
        stem = _stem(source)
        if stem in self._family.row_orders:
            packed = packed.rows(self._row_order(stem, packed.shape[0]))
        if stem in self._family.column_orders:
            order = self._order(self._family.column_orders[stem], stem, packed.shape[-1])
            packed = _with_inputs(packed, order)
        if stem in self._family.restored:
            shape, numbers = self._family.restored[stem]
            restored = numbers(packed.dequantize()).reshape(shape(packed.shape))
            return PackedWeight.plain(restored)
        if self.has_offset(name):
            packed = PackedWeight.plain(packed.dequantize() - np.float32(self._family.norm_offset))
        return packed

    def _joined_tensor(self, name: str, parts: Sequence[str]) -> PackedWeight:
        """Returns a split tensor in the precision of its parts, or in float32 if these differ."""
        parts_read = [self.file.tensor(part) for part in parts]
        arrays = [
            weight.packed().codes if weight.is_float else weight.dequantize()
            for weight in parts_read
        ]
        if len({array.dtype for array in arrays}) > 1:
            arrays = [array.astype(np.float32) for array in arrays]
        return PackedWeight.plain(np.ascontiguousarray(self._get_join_rule(name).numbers(*arrays)))

    def _get_join_rule(self, name: str) -> Joined:
        """Returns the rule for joining the parts of a split tensor."""
        return next(each for own, each in self._family.joined.items() if name.endswith(own))

    def stored(self, name: str) -> StoredTensor:
        source, expert, parts = self.locate(name)
        shape = self.file.tensors[source].shape
        if parts:
            shape = self._get_join_rule(name).shape(
                *(self.file.tensors[part].shape for part in parts)
            )
        elif (restored := self._family.restored.get(_stem(source))) is not None:
            shape = restored.shape(shape)
        part = self.file.files[self.file.tensors[source].part]
        return StoredTensor(name, shape if expert is None else shape[1:], part.path)

    def is_rewritable(self, name: str) -> bool:
        """Returns whether a matrix is a single tensor of the file with its inputs in their original
        order.
        """
        location = self.locate(name)
        return not location.joined and _stem(location.tensor) not in self._family.column_orders

    def release(self) -> None:
        for part in self.file.files:
            part.mapped.madvise(mmap.MADV_DONTNEED)

    def in_file_order(self, name: str, rows: NDArray) -> NDArray:
        """Returns rows in the order of the file, given in the family's order."""
        stem = _stem(self.locate(name).tensor)
        if stem not in self._family.row_orders:
            return rows
        ordered: NDArray = rows[np.argsort(self._row_order(stem, len(rows)))]
        return ordered

    def to_stored_values(self, name: str, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns a vector as stored in the file; some norms are stored with 1 added."""
        return vector + np.float32(self._family.norm_offset) if self.has_offset(name) else vector

    def has_offset(self, name: str) -> bool:
        """Returns whether the file stores a tensor with an offset."""
        source = self.locate(name).tensor
        return (
            bool(self._family.norm_offset)
            and source.endswith("norm.weight")
            and _stem(source) not in self._family.plain_norms
        )

    def names_in(self, tensor: str) -> list[str]:
        """Returns the names of the tensors or experts' matrices in a tensor of the file."""
        return [name for name, location in self._gguf_names.items() if location.tensor == tensor]

    def locate(self, name: str) -> TensorLocation:
        """Returns the location of a tensor in the file; raises WeightMismatch if it is missing."""
        source = self._gguf_names.get(name)
        if source is None:
            raise WeightMismatch(
                f"{self.path}: the tensor {name} is missing",
                hint="the file may be incomplete or of another architecture; download it again",
            )
        return source

    def tokenizer_source(self) -> TokenizerSource | None:
        tokens = self._get("tokenizer.ggml.tokens", list, [])
        if not tokens:
            return None
        prefix, suffix = self._affixes(tokens)
        templates = self._chat_templates()
        vocabulary = replace(
            self._vocabulary(),
            scores=self._numbers("tokenizer.ggml.scores"),
            add_space_prefix=self._get("tokenizer.ggml.add_space_prefix", bool, True),
            prefixes_segments=True,
            charsmap=bytes(self._charsmap()),
            removes_spaces=self._get("tokenizer.ggml.remove_extra_whitespaces", bool, True),
            prefix=prefix,
            suffix=suffix,
            lowercase=self._get("tokenizer.ggml.normalizer.lowercase", bool, None),
            strips_accents=self._get("tokenizer.ggml.normalizer.strip_accents", bool, None),
        )
        vocabulary = replace(vocabulary, stripped_sides=self._stripped_sides(vocabulary))
        return TokenizerSource(
            origin=self.path,
            vocabulary=vocabulary,
            special_tokens=self._special_tokens(tokens),
            eos_token_ids=self._eos_ids,
            add_bos_token=None
            if self._family.affixes
            else self._get("tokenizer.ggml.add_bos_token", bool, None),
            has_type_ids=vocabulary.model == "bert",
            chat_template=templates.pop("default", None) or next(iter(templates.values()), None),
            named_templates=templates,
        )

    def _chat_templates(self) -> dict[str, str]:
        """Returns the chat templates by name; the main one is "default"."""
        main, start = "tokenizer.chat_template", "tokenizer.chat_template."
        templates = {
            key.removeprefix(start): self._get(key, str, "")
            for key in self.file.metadata
            if key.startswith(start)
        }
        default = self._get(main, str, None)
        return templates if default is None else templates | {"default": default}

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(
            model=self._get("tokenizer.ggml.model", str, ""),
            pre=self._get("tokenizer.ggml.pre", str, ""),
            tokens=self._get("tokenizer.ggml.tokens", list, []),
            types=self._numbers("tokenizer.ggml.token_type"),
            merges=self._get("tokenizer.ggml.merges", list, ()),
        )

    def _stripped_sides(self, vocabulary: Vocabulary) -> dict[bytes, Side]:
        """Returns the side on which special tokens strip white space, by model and token name as in
        llama.cpp, since headers do not contain it.
        """
        name = self._get("general.name", str, "").lower()
        masks = {
            b"<mask>": vocabulary.pre in ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert")
            or self.architecture in ("nomic-bert-moe", "jina-bert-v3"),
            b"[MASK]": "modern-bert" in name,
        }
        sides: dict[bytes, Side] = {token: "left" for token, strips in masks.items() if strips}
        if "phi-3" in name or "phi3" in name:
            kinds = zip(vocabulary.tokens, vocabulary.types, strict=False)
            special = {token for token, kind in kinds if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
            plain = {b"<unk>", b"<s>", b"<|endoftext|>"}
            sides |= dict.fromkeys((special | {b"</s>"}) - plain, "right")
        return sides

    def _charsmap(self) -> NDArray[np.uint8]:
        """Returns the compiled normalization of a unigram model; empty if there is none."""
        key = "tokenizer.ggml.precompiled_charsmap"
        charsmap: NDArray = self._get(key, np.ndarray, np.empty(0, np.uint8))
        return charsmap.astype(np.uint8)

    def _affixes(self, tokens: list[bytes]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the special tokens before and after a text."""
        where = self._family.affixes
        if where == "around":
            first = self._special_token(tokens, ("cls", "bos"))
            return first, self._special_token(tokens, ("seperator", "eos"))
        may_end = where == "behind" or "pooling" in self.config
        ends = self._get("tokenizer.ggml.add_eos_token", bool, where == "behind")
        return (), self._special_token(tokens, ("eos",)) if may_end and ends else ()

    def _special_token(self, tokens: list[bytes], kinds: Sequence[str]) -> tuple[str, ...]:
        """Returns the special token of the first kind in the header; () if there is none."""
        for kind in kinds:
            token_id = self._token_id(kind)
            if token_id is not None and token_id < len(tokens):
                return (tokens[token_id].decode(errors="replace"),)
        return ()

    def _names(self) -> dict[str, TensorLocation]:
        """Maps safetensors names to tensors of the file. Rejects tensors unknown to the family,
        because ignoring them would change results.
        """
        locations: dict[str, TensorLocation] = {}
        for source, entry in self.file.tensors.items():
            if source in IGNORED_TENSORS:
                continue
            if (whole := self._family.joined_name(source)) is not None:
                locations[whole] = self._locate_parts(whole, source)
                continue
            name = self._family.name(source)
            if name is None:
                raise UnsupportedModel(
                    f"{self.path}: the tensor {source} is unknown in the family"
                    f" {self._family.model_type}"
                )
            if "{}" in name and len(entry.shape) > 2:
                locations |= {
                    name.format(e): TensorLocation(source, e) for e in range(entry.shape[0])
                }
            else:
                locations[name.replace(".{}", "")] = TensorLocation(source)
        return locations

    def _locate_parts(self, name: str, source: str) -> TensorLocation:
        """Returns the location of a split tensor, given any part of it."""
        stem = _stem(source)
        parts = tuple(source.replace(stem, each) for each in self._get_join_rule(name).stems)
        missing = [part for part in parts if part not in self.file.tensors]
        if missing:
            raise WeightMismatch(
                f"{self.path}: the tensor {missing[0]} is missing",
                hint="the file may be incomplete or of another architecture; download it again",
            )
        return TensorLocation(parts[0], joined=parts)

    def _row_order(self, stem: str, num_rows: int) -> NDArray[np.intp]:
        """Returns the row of the file for each row in the family's order."""
        return self._order(self._family.row_orders[stem], stem, num_rows)

    def _order(self, order: RowOrder, stem: str, num_rows: int) -> NDArray[np.intp]:
        try:
            return order(self.config, num_rows)
        except WeightMismatch as fault:
            raise WeightMismatch(f"{self.path}: {stem} has {fault}") from None

    def _config(self) -> dict[str, Any]:
        tensors = self.file.tensors
        if "token_embd.weight" not in tensors:
            raise WeightMismatch(
                f"{self.path}: the tensor token_embd.weight is missing",
                hint="the file may be incomplete or of another architecture; download it again",
            )
        return {
            "model_type": self._family.model_type,
            **pooling_config(self._header),
            **self._family.config(self._header),
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": self._token_id("eos"),
            "dtype": self._dtype(),
        }

    def _dtype(self) -> str:
        """Returns the dtype of the matrices if they are all bf16 or fp16, else float32."""
        kinds = {entry.kind.name for entry in self.file.tensors.values() if len(entry.shape) > 1}
        return (
            {"BF16": "bfloat16", "F16": "float16"}.get(next(iter(kinds)), "float32")
            if len(kinds) == 1
            else "float32"
        )

    def _generation_config(self) -> dict[str, Any]:
        values = {name: self._get(key, (int, float), None) for key, name in SAMPLING_KEYS.items()}
        values = {name: _round(value) for name, value in values.items() if value is not None}
        if "temperature" in values:
            values["do_sample"] = values["temperature"] > 0
        return values | {
            "bos_token_id": self.config["bos_token_id"],
            "eos_token_id": list(self._eos_ids),
        }

    def _end_ids(self) -> tuple[int, ...]:
        """Returns the ids of tokens that end a text: valid ids in the header, and tokens with
        well-known texts.
        """
        token_ids = [self._token_id(kind) for kind in END_KEYS]
        named = [i for i in token_ids if i is not None]
        vocabulary = self._vocabulary()
        return find_end_tokens(find_control_tokens(vocabulary), named)

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Returns a metadata value; `default` if the key is missing. Raises WeightMismatch for
        another type.
        """
        value = self.file.metadata.get(key)
        if value is not None and not isinstance(value, kind):
            allowed = " or ".join(
                one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,))
            )
            raise WeightMismatch(
                f"{self.path}: {key} is a {type(value).__name__}, expected {allowed}"
            )
        return default if value is None else value

    def _numbers(self, key: str) -> list[Any]:
        """Returns one Python number per token; empty if the key is missing.

        Python numbers are several times faster to loop over than NumPy's.
        """
        found: NDArray | tuple[()] = self._get(key, np.ndarray, ())
        return found.tolist() if isinstance(found, np.ndarray) else []

    def _special_tokens(self, tokens: list[bytes]) -> dict[str, str]:
        return {
            f"{ours}_token": token
            for ours, theirs in _SPECIAL_IDS.items()
            for token in self._special_token(tokens, (theirs,))
        }

    def _token_id(self, kind: str) -> int | None:
        """Returns the id of a special token in the header if it is valid, else the default id of
        the tokenizer model if that is a special token.
        """
        size = len(self._get("tokenizer.ggml.tokens", list, []))
        token_id: int | None = self._get(f"tokenizer.ggml.{kind}_token_id", int, None)
        if token_id is not None and 0 <= token_id < (size or token_id + 1):
            return token_id
        model = self._get("tokenizer.ggml.model", str, "")
        default = DEFAULT_IDS.get(model, {}).get(kind, size)
        types = self._numbers("tokenizer.ggml.token_type")
        is_special = default < len(types) and types[default] in (UNKNOWN, CONTROL)
        return default if is_special else None


def _with_inputs(packed: StoredWeight, order: NDArray[np.intp]) -> PackedWeight:
    """Reorders a matrix's inputs: input i of the result is input order[i] of the file."""
    whole = packed.packed()
    if whole.is_float:
        return PackedWeight.plain(np.ascontiguousarray(whole.codes[..., order]))
    if (order == np.arange(len(order))).all():
        return whole
    return replace(whole, input_permutation=np.argsort(order).astype(np.int32))


_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _stem(source: str) -> str:
    """Returns the last part of a tensor's name: "attn_q" for "blk.0.attn_q.weight", "ssm_a" for
    "blk.0.ssm_a".
    """
    parts = source.removesuffix(".weight").removesuffix(".bias").split(".")
    return parts[-1]


def _round(value: float) -> float:
    """Rounds a float32 to the decimal number that it was converted from; integers are unchanged."""
    return value if isinstance(value, int) else float(f"{value:.{FLOAT32_DIGITS}g}")
