"""Prompt embeddings: reads them from arrays and files, and inserts them as a prompt's first rows.

Files are NumPy's .npy and those of `torch.save`, which clients of vLLM send in base64. PyTorch is
not needed: of a pickle only a tensor's own calls are accepted.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import InvalidRequest, shown
from octavo.engine.protocol.step import MediaContent, MediaItem
from octavo.text.ports import DecodedMedia

NAME = "prompt_embeds"
HINT = "send the base64 of torch.save's or numpy.save's output, of shape [tokens, hidden_size]"

STORAGES: Final = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class PromptEmbedsReader:
    """Reads the embeddings of a prompt. `width`: numbers per token; `max_tokens`: most tokens."""

    width: int
    max_tokens: int

    def read(self, source: object) -> DecodedMedia:
        """Returns an array `[T, width]` (NumPy, PyTorch, or the base64 of a file) as the media that
        replaces its T placeholder tokens; raises InvalidRequest.
        """
        rows = _read_array(source)
        if rows.ndim == 3 and len(rows) == 1:
            rows = rows[0]
        if rows.ndim != 2 or rows.shape[1] != self.width or not 0 < len(rows) <= self.max_tokens:
            raise _refusal(
                f"got the shape {list(rows.shape)}, expected [tokens, {self.width}] with 1 to"
                f" {self.max_tokens} tokens"
            )
        if not np.isfinite(rows).all():
            raise _refusal("got NaN or infinity among its numbers, expected finite ones")
        data = np.ascontiguousarray(rows, "<f4").tobytes()
        digest = blake2b(data, digest_size=16, person=b"octavo embeds").digest()
        count = len(rows)
        return DecodedMedia(
            [0] * count,
            [MediaItem(digest, 0, count, (1, count))],
            [MediaContent(digest, count, self.width, data, kind="embeds")],
            kind="embeds",
        )


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(f"{NAME}: {message}", hint=HINT, param=NAME)


def _read_array(source: Any) -> NDArray[np.float32]:
    if isinstance(source, str):
        source = _read_file(source)
    elif hasattr(source, "is_floating_point"):  # a PyTorch tensor; NumPy cannot read bf16
        source = source.detach().cpu()
        source = (source.float() if source.is_floating_point() else source).numpy()
    rows = np.asarray(source)
    if rows.dtype.kind != "f" and rows.dtype != ml_dtypes.bfloat16:
        raise _refusal(f"got {shown(str(rows.dtype))}, expected an array of floats")
    return rows.astype(np.float32)


def _read_file(text: str) -> NDArray[Any]:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(f"its base64 cannot be read: {error}") from None
    try:
        if data[:2] == b"PK":
            return _read_torch(data)
        return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))
    except Exception as error:  # damaged files raise many kinds of errors
        raise _refusal(f"its file cannot be read: {str(error) or type(error).__name__}") from None


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of one tensor: storages are (name of the type, key of the file)."""

    def __init__(self, data: bytes, read_storage: Callable[[str], bytes]) -> None:
        super().__init__(io.BytesIO(data))
        self._read_storage = read_storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it contains {module}.{name}, expected one dense tensor")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        _, dtype, key, *_ = pid
        return np.frombuffer(self._read_storage(str(key)), dtype)


def _rebuild(
    storage: NDArray[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> NDArray[Any]:
    flat = storage[offset:]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if min((offset, *shape, *strides)) < 0 or last >= len(flat):
        raise pickle.UnpicklingError("its tensor exceeds its storage")
    steps = [stride * flat.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)


def _read_torch(data: bytes) -> NDArray[Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if sum(info.file_size for info in names.values()) > 2 * len(data):
            raise pickle.UnpicklingError("its entries are compressed")
        pickled = archive.read(names["data.pkl"])
        loaded = _TensorUnpickler(pickled, lambda key: archive.read(names[f"data/{key}"])).load()
    if not isinstance(loaded, np.ndarray):
        raise pickle.UnpicklingError(f"it holds a {type(loaded).__name__}, expected a tensor")
    return loaded
