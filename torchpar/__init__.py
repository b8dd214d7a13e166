"""torchpar: the PyTorch side. `python -m torchpar RUN_DIR` runs torch-manual and torch-library."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare.contract.ledger import Ledger


def ledger(mesh: Any = None) -> "AbstractContextManager[Ledger]":
    """Communication of this rank inside, with the lines and modules that cause it: `measure.places`."""
    from torchpar.measure.places import ledger_of  # the package itself stays light

    return ledger_of(mesh)
