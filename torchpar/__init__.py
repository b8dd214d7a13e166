"""torchpar: the PyTorch side. `python -m torchpar RUN_DIR` runs torch-manual and torch-library.

For modules of your own: `DataParallel`, `FSDP`, `ShardedOptimizer`, and `ledger`.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare.contract.ledger import Ledger
    from torchpar.guards.data_parallel import DataParallel as DataParallel
    from torchpar.guards.fully_sharded import FSDP as FSDP
    from torchpar.guards.sharded_optimizer import ShardedOptimizer as ShardedOptimizer

_WRAPPERS = {
    "DataParallel": "data_parallel",
    "FSDP": "fully_sharded",
    "ShardedOptimizer": "sharded_optimizer",
}
"""What wraps any module, and its file in `guards`."""


def __getattr__(name: str) -> Any:
    if name in _WRAPPERS:  # imported when it is asked for: the package itself stays light
        return getattr(import_module(f"torchpar.guards.{_WRAPPERS[name]}"), name)
    raise AttributeError(f"module 'torchpar' has no attribute {name!r}")


def ledger(mesh: Any = None) -> "AbstractContextManager[Ledger]":
    """Communication of this rank inside, with the lines and modules that cause it: `measure.places`."""
    from torchpar.measure.places import ledger_of

    return ledger_of(mesh)
