"""Reading a checkpoint: its files are checked, then any part of any tensor can be read."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from compare.checkpoint.description import (
    DESCRIPTION,
    FORMAT,
    OFFSETS,
    READABLE,
    SHARDING,
    STEP,
    WEIGHTS,
    Checkpoint,
    FileSum,
    digest_of,
    key,
    step_in_name,
    tensor_shapes,
)
from compare.numerics.boxes import Box, Weights, full_box
from compare.numerics.parameters import parameter_table, storage_dtype
from compare.spec.experiment import ExperimentError, revalidate
from compare.system.json_files import read_json
from compare.system.tensors import RecordError, garbled

OPEN_FILES = 128


class CheckpointError(ExperimentError):
    """A checkpoint that cannot be used. The message is one line with the file and the fault."""


class CheckpointReader:
    """Reads parts of the tensors of one checkpoint. `verify` also checks the contents of its files.

    Raises CheckpointError: the folder is not a checkpoint, a file or a part of a tensor is missing, or a
    tensor does not belong to the model.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.description = read_description(folder)
        self._shapes = tensor_shapes(self.description.experiment)
        self._dtype = storage_dtype(self.description.experiment)
        self._parts: dict[str, list[tuple[Box, str]]] = {name: [] for name in self._shapes}
        self._file = lru_cache(maxsize=OPEN_FILES)(_open)
        for name in self.description.files:
            self._note_parts(name, self._file(self.folder / name))
        for name, parts in self._parts.items():
            there, size = sum(box.size for box, _ in parts), full_box(self._shapes[name]).size
            if there != size:
                raise CheckpointError(f"{self.folder}: its files hold {there} of {size} elements of {name}")

    def verify(self, *, blamed: Path | None = None) -> None:
        """Check the checksum of every file, and that all values are finite. Raises CheckpointError.

        `blamed` is the source of converted files, which an error names.
        """
        for name, expected in self.description.files.items():
            if (there := sum_of(self.folder / name)) != expected:
                size = f"{there.bytes} of {expected.bytes} bytes" if there.bytes != expected.bytes else ""
                raise CheckpointError(
                    f"{self.folder / name}: {size or 'its contents have changed'} (sha256): the checkpoint "
                    f"is damaged; use an older one"
                )
        for name, parts in self._parts.items():
            for part, file_name in parts:
                values = self._slice(file_name, name, full_box(part.shape).slices)
                source = blamed or self.folder / file_name
                if not np.isfinite(values).all():
                    raise CheckpointError(
                        f"{source}: {name} has values that are NaN or infinite: nothing can go on from them"
                    )
                if not self.description.updates and name.partition("/")[0] != WEIGHTS and values.any():
                    raise CheckpointError(
                        f"{source}: {name} is not zero, and the checkpoint has 0 updates: it is damaged; use "
                        f"an older one"
                    )
                if name.startswith(key("v", "")) and (values < 0).any():
                    raise CheckpointError(
                        f"{source}: {name} has negative values, which no mean of squares has: the "
                        f"checkpoint is damaged; use an older one"
                    )

    def read(self, group: str, name: str, box: Box | None = None) -> np.ndarray:
        """A box of a tensor, of the box's shape; None: the full tensor.

        The group is weights, m or v; the name is canonical. Raises CheckpointError: parts do not cover the
        box.
        """
        wanted = full_box(self._shapes[key(group, name)]) if box is None else box
        array, seen = np.empty(wanted.shape, self._dtype), np.zeros(wanted.shape, bool)
        for part, file_name in self._parts[key(group, name)]:
            if common := part.overlap(wanted):
                at = common.within(wanted)
                array[at] = self._slice(file_name, key(group, name), common.within(part))
                seen[at] = True
        if not seen.all():
            raise CheckpointError(
                f"{self.folder}: parts of {key(group, name)} overlap, and {np.count_nonzero(~seen)} of its "
                f"elements are in none: the checkpoint is damaged"
            )
        return array

    def group(self, group: str) -> "Group":
        """The weights or a moment by canonical name, each read on access."""
        return Group(self, group)

    def _slice(self, file_name: str, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        return self._file(self.folder / file_name).get_slice(name)[slices]

    def _note_parts(self, file_name: str, file: safe_open) -> None:
        offsets, here = _offsets(self.folder / file_name, file), str(self.description.step)
        if (step := (file.metadata() or {}).get(STEP, here)) != here:
            raise CheckpointError(
                f"{self.folder / file_name} is of step {step}, and the checkpoint of {here}"
            )
        for name in file.keys():  # noqa: SIM118 (no mapping)
            part = file.get_slice(name)
            where = f"{self.folder / file_name}: {name}"
            if name not in self._shapes:
                raise CheckpointError(f"{where} is not a tensor of this model and optimizer")
            shape, size = tuple(part.get_shape()), self._shapes[name]
            offset = offsets.get(name, (0,) * len(shape))
            fits = len(offset) == len(shape) == len(size) and all(
                start >= 0 and start + n <= most for start, n, most in zip(offset, shape, size, strict=True)
            )
            if not fits:
                raise CheckpointError(f"{where} has shape {shape} at {offset}, and the tensor {size}")
            if part.get_dtype() != _DTYPES[self._dtype.name]:
                raise CheckpointError(f"{where} is {part.get_dtype()} instead of {self._dtype}")
            self._parts[name].append((Box(offset, shape), file_name))


class Group(Weights):
    """Weights or a moment of a checkpoint by canonical name, each read on access."""

    def __init__(self, reader: CheckpointReader, group: str):
        names = [row.name for row in parameter_table(reader.description.experiment.model)]
        super().__init__(names, partial(reader.read, group))
        self._read_box = partial(reader.read, group)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        return [self._read_box(name, box) for box in boxes]


_DTYPES = {"float32": "F32", "float64": "F64"}


def read_description(folder: Path) -> Checkpoint:
    """Read checkpoint.json. Raises CheckpointError: the file is missing or invalid."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {DESCRIPTION}: it is not a checkpoint")
    try:
        description = read_json(path, Checkpoint)
        revalidate(description.experiment)
    except RecordError as error:
        raise CheckpointError(str(error)) from None
    except ExperimentError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if description.format not in READABLE:
        raise CheckpointError(
            f"{path}: format = {description.format}, and this version reads {FORMAT}: use the version that "
            f"wrote it"
        )
    why = description.contradiction
    if description.format > 1 and digest_of(msgspec.json.decode(path.read_bytes())) != description.sha256:
        why = "it has changed since it was written (sha256)"
    elif (step := step_in_name(folder)) not in (None, description.step):
        why = f"its folder is named after step {step}, and it is of step {description.step}"
    if why:
        raise CheckpointError(f"{path}: {why}: the checkpoint is damaged; use an older one")
    return description


def sum_of(path: Path) -> FileSum:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return FileSum(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is not whole")
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(garbled(path, error))) from None


def _offsets(path: Path, file: safe_open) -> dict[str, tuple[int, ...]]:
    """First index of each tensor of a file, from its metadata."""
    text = (file.metadata() or {}).get(SHARDING, "{}")
    try:
        entries = msgspec.json.decode(text, type=dict[str, dict[str, list[int]]])
        return {name: tuple(entry[OFFSETS]) for name, entry in entries.items()}
    except (KeyError, RecursionError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: {SHARDING} of its metadata cannot be read: {error}") from None
