"""The JAX side: `python -m jaxpar RUN_DIR` runs an engine. `FUNCTIONS` are for programs of your own."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare.contract.ledger import assert_communication as assert_communication
    from jaxpar.measure.ledger import ledger_of as ledger  # noqa: F401  it is exported
    from jaxpar.same import assert_same as assert_same

PACKAGES = ("numpy", "jax", "jaxlib", "flax", "optax")
"""Packages on which numbers depend."""
FUNCTIONS = {
    "ledger": ("jaxpar.measure.ledger", "ledger_of"),
    "assert_same": ("jaxpar.same", "assert_same"),
    "assert_communication": ("compare.contract.ledger", "assert_communication"),
}
"""Functions of this package, with the module and the name of each. JAX is imported with the first use."""


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_compare()
    if not find_spec("jax"):
        raise ImportError(f"jaxpar.{name} needs JAX: pip install 'shardpair[jax]'")
    module, function = FUNCTIONS[name]
    return getattr(import_module(module), function)


def require_compare() -> None:
    """Raise ImportError if another module hides the package `compare`. It is not executed."""
    found = find_spec("compare")
    if found and found.origin and not (Path(found.origin).parent / "contract" / "request.py").is_file():
        raise ImportError(f"{found.origin} hides shardpair's package `compare`: rename it")
