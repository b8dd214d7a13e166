"""Collectives of ours that nobody waited for: what they gave was there by luck."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torchpar.comm.collectives import Axis, Work

STARTS = [name for name in vars(Axis) if name.startswith("start_")]


@contextmanager
def waits_held(object_to: Callable[[str], None]) -> Generator[None]:
    """Around what begins collectives and waits for them: a step.

    Args:
        object_to: called at the end with a line for each kind of collective that was never waited for. Its
            result may be read before it is there, and mostly is not: numbers seldom tell.
    """
    under_way = Counter[str]()
    with ExitStack() as stack:
        for name in STARTS:
            kind = name.removeprefix("start_")
            stack.enter_context(patch.object(Axis, name, _held(getattr(Axis, name), kind, under_way)))
        yield
    for what, count in under_way.items():
        if count:
            object_to(f"{count} {what}: never waited for, so that its result was there by luck")


def _held(start: Callable[..., Work], kind: str, under_way: Counter[str]) -> Callable[..., Work]:
    """`Axis.start_...` whose work is under way until somebody waits for it."""

    @wraps(start)
    def started(axis: Axis, *arguments: Any, **keywords: Any) -> Work:
        purpose = f" of {keywords['purpose']}" if keywords.get("purpose") else ""
        return _Held(start(axis, *arguments, **keywords), f"{kind}{purpose} over {axis.name}", under_way)

    return started


class _Held:
    def __init__(self, work: Work, what: str, under_way: Counter[str]):
        self._work, self._what, self._under_way = work, what, under_way
        under_way[what] += 1

    def wait(self) -> object:
        """Wait, and be under way no more."""
        if self._what:
            self._under_way[self._what] -= 1
            self._what = ""
        return self._work.wait()
