"""The part of one mesh axis in a step of jax-manual."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpar.hooks import identity


class Strategy(NamedTuple):
    """The changes of one mesh axis. The engine applies the strategies of all axes in one order."""

    mark: Callable[[Any], Any] = identity
    """Marks parameters as varying before differentiation, so that their gradients stay local."""
    reduce: Callable[[Any], Any] = identity
    """Reduces accumulated gradients that are partial along the axis."""
