"""What one mesh axis adds to a step of jax-manual."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpar.linear import same
from jaxpar.model import ModelPatch


class Strategy(NamedTuple):
    """The changes of one mesh axis. The engine applies the strategies of all axes in one order."""

    edit: ModelPatch = same
    """Adds communication of activations, or of parameters, to the model."""
    mark: Callable[[Any], Any] = same
    """Marks parameters as varying before differentiation, so that their gradients stay local."""
    reduce: Callable[[Any], Any] = same
    """Reduces accumulated gradients that are partial along the axis."""
