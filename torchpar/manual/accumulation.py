"""Gradient accumulation: gradients of a step's passes add up, and only those of the last are reduced."""

from collections.abc import Generator
from contextlib import contextmanager


class Accumulates:
    """A wrapper that reduces gradients in backward, except in `no_sync`."""

    is_synchronizing = True

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Only accumulate: put it around forward and backward of every pass of a step but the last."""
        before, self.is_synchronizing = self.is_synchronizing, False
        try:
            yield
        finally:
            self.is_synchronizing = before
