"""nanoGPT's own numbers, which every engine is held to.

A default that is wrong in our contract is wrong in all engines, and they agree. So nanoGPT itself was run
(`tests/make_golden.py`): with AdamW, and with `torch.optim.SGD` in its place. What it computed is kept as
records like any other. Whatever golden.toml does not name was nanoGPT's own default there, and is ours here.
"""

from pathlib import Path

from compare.contract.record import Record, read_record

FOLDER = Path(__file__).parent.parent / "goldens" / "nanogpt"
NANOGPT = "nanoGPT"


def folder_of(optimizer: str) -> Path:
    """Where the record of a training by adamw or sgd is, and its origin (provenance.json)."""
    return FOLDER if optimizer == "adamw" else FOLDER.with_name(f"{FOLDER.name}-{optimizer}")


def read_golden(optimizer: str) -> Record:
    """nanoGPT's record. Raises RecordError: a file of it is missing or garbled."""
    return read_record(folder_of(optimizer), requested=False)
