"""The PyTorch side: `python -m torchpar RUN_DIR` runs an engine. `ledger` is for programs of your own."""

from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from compare.contract.ledger import Ledger

PACKAGES = ("torch", "numpy")
"""Packages on which a rank's numbers depend."""


def ledger(mesh: "DeviceMesh | None" = None) -> "AbstractContextManager[Ledger]":
    """Record this rank's communication inside the context, with its source lines: `measure.ledger`.

    Process groups get the names of the dimensions of `mesh`. Without a mesh PyTorch's default group, which a
    mesh of one dimension uses, is `world`.
    """
    require_compare()
    from torchpar.measure.ledger import ledger_of

    return ledger_of(mesh)


def require_compare() -> None:
    """Raise ImportError if another module hides the package `compare`. It is not executed."""
    found = find_spec("compare")
    if found and found.origin and not (Path(found.origin).parent / "contract" / "request.py").is_file():
        raise ImportError(f"{found.origin} hides shardpair's package `compare`: rename it")
