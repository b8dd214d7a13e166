"""Tensor files, read one tensor at a time, and the error of a file that cannot be read."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

NOT_IN_NUMPY = ("F8_", "F6_", "F4")
"""Prefixes of dtypes of safetensors."""
BFLOAT16 = "BF16"


class RecordError(ValueError):
    """A file of a record is missing or invalid. The message is one line with its path."""


def garbled(path: Path, error: Exception) -> RecordError:
    """The RecordError of a file that cannot be read because of `error`."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RecordError(f"{path} cannot be read: {' '.join(why.split()) or type(error).__name__}")


class Tensors(Mapping[str, np.ndarray]):
    """Tensors of a file by name. Each access reads one tensor from disk, so the model never is in memory.

    Raises RecordError: the file is invalid.
    """

    def __init__(self, path: Path):
        self._path = path
        if not path.is_file():
            raise RecordError(f"{path} cannot be read: the file does not exist")
        try:
            self._file = safe_open(path, framework="numpy")
            self._names = tuple(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise garbled(path, error) from None

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        dtype = self._file.get_slice(name).get_dtype()
        if dtype == BFLOAT16:
            return self._widened(name)
        if dtype.startswith(NOT_IN_NUMPY):  # even if a package has registered it with NumPy
            raise RecordError(f"{self._path}: {name} is {dtype}, which NumPy lacks: write it as float32")
        try:
            return self._file.get_tensor(name)
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise garbled(self._path, error) from None

    def _widened(self, name: str) -> np.ndarray:
        """A bfloat16 tensor as float32: NumPy lacks bfloat16, whose bits are the first half of a float32."""
        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = msgspec.json.decode(file.read(size))[name]
            first, end = entry["data_offsets"]
            file.seek(8 + size + first)
            halves = np.frombuffer(file.read(end - first), "<u2")
        return (halves.astype("<u4") << 16).view("<f4").reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
