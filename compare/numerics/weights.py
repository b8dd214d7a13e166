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
    """Tensors by canonical name that `read` puts together when they are asked for, and that are not kept."""

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]):
        self._names, self._read = list(names), read

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Given(OneByOne, Weights):
    """Weights that are in memory: canonical name -> full tensor."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        super().__init__(arrays, arrays.__getitem__)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Views."""
        return [self[name][box.slices] for box in boxes]
