"""The JAX side: `python -m jaxpar RUN_DIR` runs an engine. `ledger` is for programs of your own."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from compare.contract.ledger import Ledger

PACKAGES = ("numpy", "jax", "jaxlib", "flax", "optax")
"""Packages on which numbers depend."""


def ledger(function: Callable[..., Any], *arguments: Any, mesh: "Mesh") -> "Ledger":
    """Communication of a function, with the source lines that cause it: `measure.ledger.ledger_of`."""
    require_compare()
    from jaxpar.measure.ledger import ledger_of  # JAX is configured before this import

    return ledger_of(function, *arguments, mesh=mesh)


def require_compare() -> None:
    """Raise ImportError if another module hides the package `compare`. It is not executed."""
    found = find_spec("compare")
    if found and found.origin and not (Path(found.origin).parent / "contract" / "request.py").is_file():
        raise ImportError(f"{found.origin} hides shardpair's package `compare`: rename it")
