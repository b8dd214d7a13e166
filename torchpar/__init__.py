"""torchpar: the PyTorch side. `python -m torchpar RUN_DIR` runs an engine.

For modules of your own: `wrappers.DataParallel`, `FSDP`, `ShardedOptimizer`, and `ledger`.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare.contract.ledger import Ledger
    from torchpar.wrappers import FSDP as FSDP
    from torchpar.wrappers import DataParallel as DataParallel
    from torchpar.wrappers import ShardedOptimizer as ShardedOptimizer


def __getattr__(name: str) -> Any:
    if name in ("DataParallel", "FSDP", "ShardedOptimizer"):  # the package itself stays light
        from torchpar import wrappers

        return getattr(wrappers, name)
    raise AttributeError(f"module 'torchpar' has no attribute {name!r}")


def ledger() -> "AbstractContextManager[Ledger]":
    """Communication of this rank inside, with the lines and modules that cause it: `measure.ledger`."""
    from torchpar.measure.ledger import ledger_of

    return ledger_of()
