"""Collectives under way, alone or as parts of a larger one."""

from collections.abc import Callable, Sequence
from typing import Protocol


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return once its result is there (on a GPU: for all kernels that are launched after this)."""
        ...


class CompletedWork:
    """A collective of one rank, done where it begins."""

    def __init__(self, do: Callable[[], object]):
        do()

    def wait(self) -> None:
        """Returns at once: the collective is done."""


class WorkGroup:
    """Several collectives as one."""

    def __init__(self, works: Sequence[Work]):
        self._works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()


class WorkThen:
    """A collective, and what remains to be computed of its result."""

    def __init__(self, work: Work | None, finish: Callable[[], object]):
        assert work is not None
        self._work, self._finish = work, finish

    def wait(self) -> None:
        """Wait, then finish."""
        self._work.wait()
        self._finish()
