"""Weights by canonical name, each read when it is asked for: whole, or the boxes that a process holds."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from compare.numerics.boxes import Box


class Weights(Mapping[str, np.ndarray]):
    """Canonical name -> full tensor. Nothing is kept, so that no process needs the whole model at once."""

    @abstractmethod
    def boxes(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Some boxes of a tensor, each of its box's shape, without the rest of it in memory."""


class OneByOne(Mapping[str, np.ndarray]):
    """Tensors that are put together when they are asked for, and not kept.

    Args:
        names: canonical.
        read: of a name, the full tensor.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]):
        self._names, self._read = list(names), read

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Given(Weights):
    """Weights that are in memory.

    Args:
        arrays: canonical name -> full tensor.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Views."""
        return [self._arrays[name][box.slices] for box in boxes]
