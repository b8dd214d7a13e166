"""nanoGPT's own numbers, which every engine is held to.

All engines have one contract: a default that is wrong in it is wrong in all of them, and they agree. So
nanoGPT itself was run (`tests/make_golden.py`), and what it computed is kept as records like any other.
Whatever golden.toml does not name was nanoGPT's own default there, and is ours here. It was run twice: the
second time its `configure_optimizers` found `torch.optim.SGD` in AdamW's place, so that SGD's schedule,
clipping and decay are held, too.
"""

from pathlib import Path

from msgspec import Struct

from compare.contract.record import Record, read_record
from compare.host.json_files import read_own_json
from compare.host.tensors import RecordError

FOLDER = Path(__file__).parent.parent / "goldens" / "nanogpt"
NANOGPT = "nanoGPT"
PROVENANCE = "provenance.json"


class Provenance(Struct, frozen=True, kw_only=True):
    """Origin of a golden."""

    source: str
    """The repository whose code was run."""
    commit: str
    ran: dict[str, str]
    """SHA-256 of each of its files that was executed, by name."""


def folder_of(optimizer: str) -> Path:
    """Where the record of a training by adamw or sgd is."""
    return FOLDER if optimizer == "adamw" else FOLDER.with_name(f"{FOLDER.name}-{optimizer}")


def read_golden(folder: Path = FOLDER) -> tuple[Record, Provenance]:
    """nanoGPT's record, and where it is from.

    Raises:
        RecordError: a file of it is missing or garbled.
    """
    try:
        provenance = read_own_json(folder / PROVENANCE, Provenance)
        return read_record(folder, requested=False), provenance
    except OSError as error:
        raise RecordError(f"the golden in {folder} cannot be read: {error}") from None
