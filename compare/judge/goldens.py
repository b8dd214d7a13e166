"""nanoGPT's own numbers, which every engine must reproduce.

A wrong default of the experiment would be wrong in all engines, and they would agree. So nanoGPT itself was
run (`tests/make_golden.py`), with AdamW and with `torch.optim.SGD`. Its numbers are records like any other.
Fields that golden.toml does not name have nanoGPT's defaults, which must be ours.
"""

import functools
from pathlib import Path

from compare.contract.record import Record, read_record
from compare.judge.alone import Judged, judged

FOLDER = Path(__file__).parent.parent / "goldens" / "nanogpt"
NANOGPT = "nanoGPT"


def folder_of(optimizer: str) -> Path:
    """Folder of the record trained by adamw or sgd, and its origin (provenance.json)."""
    return FOLDER if optimizer == "adamw" else FOLDER.with_name(f"{FOLDER.name}-{optimizer}")


def read_golden(optimizer: str) -> Record:
    """nanoGPT's record. Raises RecordError: a file is missing or cannot be read."""
    return read_record(folder_of(optimizer), requested=False)


@functools.cache
def judged_golden(optimizer: str) -> Judged:
    """nanoGPT's record, judged alone."""
    return judged(read_golden(optimizer), NANOGPT)
