"""One order of launching for all ranks, in which each collective waits for those before it."""

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T", bound=Any)


class LaunchOrder(list[T]):
    """Groups of gradients reduced during backward, each once a step, when it `is_full`.

    An order of its own on every rank, as gradients happen to come, would mix up the collectives of ranks
    whose graphs differ.
    """

    taken = 0

    def take_full(self) -> Iterator[T]:
        """The full groups whose turn it is."""
        while self.taken < len(self) and self[self.taken].is_full:
            self.taken += 1
            yield self[self.taken - 1]

    def restart(self) -> None:
        """Forget the step."""
        self.taken = 0
