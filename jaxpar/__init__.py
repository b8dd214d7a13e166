"""The JAX side: nanoGPT in flax.nnx, sharded by the compiler or by hand. `python -m jaxpar RUN_DIR`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from compare.contract.ledger import Ledger


def ledger(function: Callable[..., Any], *arguments: Any, mesh: "Mesh") -> "Ledger":
    """Communication of a function, with the lines that cause it: `measure.ledger.ledger_of`."""
    from jaxpar.measure.ledger import ledger_of  # JAX is configured before it is imported

    return ledger_of(function, *arguments, mesh=mesh)
