"""Reductions of flat gradients during backward: which are complete, in an order that all ranks share."""

from collections.abc import Iterator

from torchpar.manual.zero.flat_gradients import FlatGradients


class ReductionQueue:
    """Flat gradients in the order in which all ranks reduce them; each waits for those before it.

    An order of its own on every rank, as gradients happen to come, would mix up the collectives of ranks
    whose graphs differ.
    """

    def __init__(self):
        self._queue: list[FlatGradients] = []
        self._taken = 0
        self._missing: dict[int, set[int]] = {}  # by place in the queue: what backward has not come to yet

    def append(self, gradients: FlatGradients) -> None:
        """Add some, behind all others. Between two steps."""
        self._queue.append(gradients)

    def arrived(self, gradients: FlatGradients, index: int) -> None:
        """This backward, the step's last, has left the gradient of the parameter at `index`."""
        place = next(place for place, other in enumerate(self._queue) if other is gradients)
        missing = self._missing.setdefault(place, set(gradients.trainable))
        missing.discard(index)

    def take_complete(self) -> Iterator[FlatGradients]:
        """Those that are complete and whose turn it is, each once a step."""
        while self._taken < len(self._queue) and self._missing.get(self._taken) == set():
            self._taken += 1
            yield self._queue[self._taken - 1]

    def reset(self) -> None:
        """Forget the step."""
        self._taken, self._missing = 0, {}
