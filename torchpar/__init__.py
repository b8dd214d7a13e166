"""torchpar: the PyTorch side. `python -m torchpar RUN_DIR` runs an engine.

For programs of your own there is `ledger`.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compare.contract.ledger import Ledger


def ledger() -> "AbstractContextManager[Ledger]":
    """Record this rank's communication inside the context, with its source lines: `measure.ledger`."""
    from torchpar.measure.ledger import ledger_of

    return ledger_of()
