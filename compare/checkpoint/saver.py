"""Writing checkpoints while training goes on: a process copies its shards, and a thread writes them."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET
from safetensors import SafetensorError
from safetensors.numpy import save_file

from compare.checkpoint.description import (
    DESCRIPTION,
    OFFSETS,
    SHARDING,
    STEP,
    UNFINISHED,
    WEIGHTS,
    Checkpoint,
    FileSum,
    checkpoints_in,
    digest_of,
    folder_name,
    groups,
    key,
)
from compare.checkpoint.reader import read_description, sum_of
from compare.numerics.boxes import to_boxes
from compare.numerics.parameters import storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, ExperimentError
from compare.system.json_files import read_json, write_json

POLL_S = 0.02

Part = tuple[str, Shard, np.ndarray]
"""Weights, m or v; a device's shard; and its elements, which the saver may keep."""
Files = dict[tuple[int, int], dict[str, tuple[tuple[int, ...], np.ndarray]]]
"""By device and number of its file: the arrays of the file by `key`, each with its offset."""


class UnfinishedError(RuntimeError):
    """Another process did not write its files of a checkpoint in time. The message is one line."""


class Saver:
    """Saves checkpoints of one process's devices, one at a time, while training goes on.

    Every process of a run writes the shards of its own devices. The process with device 0 waits for the files
    of all `of` devices, completes the checkpoint, and removes old ones: the `keep` newest and the best one
    stay. Processes need no collective, because they share the folder. If the files of a device are missing
    after `patience_s` of waiting for them in `finish`, the error names it by `name_of`.
    """

    def __init__(
        self,
        folder: Path,
        devices: Collection[int],
        *,
        of: int,
        keep: int,
        patience_s: float = math.inf,
        name_of: Callable[[int], str] = "device {}".format,
    ):
        self._folder, self._devices, self._of, self._keep = folder, sorted(devices), of, keep
        self._patience_s, self._name_of = patience_s, name_of
        self._awaited: int | None = None
        """The device whose files are missing, once this process has written its files."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, checkpoint: Checkpoint, parts: Iterable[Part]) -> None:
        """Wait for the previous checkpoint, copy the parts of this process's devices, and begin to write.

        The checkpoint has no files yet; replicas among the parts are skipped. Raises OSError: the previous
        checkpoint could not be written.
        """
        self.finish()
        self._thread = threading.Thread(
            target=self._write, args=(checkpoint, _in_files(parts)), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            OSError: it could not be written.
            UnfinishedError: another process did not write its files.
        """
        if self._thread:
            deadline = time.monotonic() + self._patience_s
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if self._awaited is not None and time.monotonic() > deadline:
                    late = f"{self._name_of(self._awaited)} wrote no files of a checkpoint"
                    raise UnfinishedError(f"{late} for {self._patience_s:g} s: does it reach {self._folder}?")
            self._thread = None
        if self._error:
            error, self._error = self._error, None
            raise error

    def _write(self, checkpoint: Checkpoint, files: Files) -> None:
        final = self._folder / folder_name(checkpoint.step)
        try:
            _write_files(final, checkpoint, files, self._devices, of=self._of, wait_for=self._wait_for)
            if 0 in self._devices:
                self._remove_old()
        except BaseException as error:
            self._error = error
            unfinished = _unfinished(final)  # make room, while other processes may still write
            for path in [path for d in self._devices for path in unfinished.glob(f"device-{d:05d}*")]:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other processes' files
                unfinished.rmdir()

    def _wait_for(self, path: Path, device: int) -> None:
        """Wait until another process has written the file of sums of a device."""
        while not path.is_file():  # if a process dies, its launcher ends this one
            self._awaited = device
            time.sleep(POLL_S)
        self._awaited = None

    def _remove_old(self) -> None:
        best = best_checkpoint(self._folder)
        for old in list(checkpoints_in(self._folder).values())[: -self._keep]:
            if old != best:
                shutil.rmtree(old.rename(_unfinished(old)))  # at once incomplete by its name


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the least validation loss in a folder; None if no loss is finite."""
    losses = {path: read_description(path).validation_loss for path in checkpoints_in(folder).values()}
    evaluated = {path: loss for path, loss in losses.items() if loss is not UNSET and math.isfinite(loss)}
    return min(evaluated, key=evaluated.__getitem__) if evaluated else None


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, tensors: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Write a checkpoint of one device, for a conversion, from tensors by group and canonical name.

    A missing moment is zero. The checkpoint has no files yet. Raises ExperimentError: the folder exists.
    """
    if folder.exists():
        raise ExperimentError(f"{folder} exists already: give another name, or remove it")
    try:
        _write_files(folder, checkpoint, _in_files(_full_shards(checkpoint.experiment, tensors)), [0], of=1)
    except BaseException:
        shutil.rmtree(_unfinished(folder), ignore_errors=True)
        raise


def _full_shards(experiment: Experiment, tensors: Mapping[str, Mapping[str, np.ndarray]]) -> Iterator[Part]:
    """Every tensor of a full state as a shard of device 0, in the dtype of stored weights."""
    dtype = storage_dtype(experiment)
    for group in groups(experiment):
        for name, weight in tensors[WEIGHTS].items():
            array = tensors[group][name] if group in tensors else np.zeros(weight.shape)
            shard = Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape)
            yield group, shard, array.astype(dtype)


def _write_files(
    final: Path,
    checkpoint: Checkpoint,
    files: Files,
    devices: Collection[int],
    *,
    of: int,
    wait_for: Callable[[Path, int], None] = lambda path, device: None,
) -> None:
    """Write the files of some devices. With device 0, wait for all files and complete the checkpoint."""
    unfinished = _unfinished(final)
    unfinished.mkdir(parents=True, exist_ok=True)
    for device in devices:
        sums = _write_device(unfinished, device, files, checkpoint.step)
        write_json(unfinished / f"device-{device:05d}.json", sums)
    if 0 not in devices:
        return
    all_sums: dict[str, FileSum] = {}
    for device in range(of):
        path = unfinished / f"device-{device:05d}.json"
        wait_for(path, device)
        all_sums |= read_json(path, dict[str, FileSum])
        path.unlink()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    checkpoint = msgspec.structs.replace(checkpoint, files=all_sums, created_utc=created, sha256="")
    digest = digest_of(msgspec.to_builtins(checkpoint))
    write_json(unfinished / DESCRIPTION, msgspec.structs.replace(checkpoint, sha256=digest))
    _to_disk(unfinished)
    unfinished.rename(final)
    _to_disk(final.parent)


def _unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def _in_files(parts: Iterable[Part]) -> Files:
    """Assign the boxes of all parts to files: the n-th box of a tensor to a device's n-th file."""
    files: Files = {}
    count: Counter[tuple[int, str]] = Counter()
    for group, shard, held in parts:
        if shard.replica:
            continue
        name = key(group, shard.name)
        for box, array in to_boxes(shard, held):
            number = count[shard.device, name]
            count[shard.device, name] += 1
            files.setdefault((shard.device, number), {})[name] = (box.offset, np.ascontiguousarray(array))
    return files


def _write_device(folder: Path, device: int, files: Files, step: int) -> dict[str, FileSum]:
    """Write the files of one device. Returns their sizes and checksums."""
    sums = {}
    for number, tensors in sorted((n, tensors) for (of, n), tensors in files.items() if of == device):
        path = folder / f"device-{device:05d}-{number}.safetensors"
        offsets = {name: {OFFSETS: list(offset)} for name, (offset, _) in tensors.items()}
        metadata = {SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt", STEP: str(step)}
        try:
            save_file({name: array for name, (_, array) in tensors.items()}, path, metadata)
        except SafetensorError as error:  # its text has the system's error: "... (os error 28)"
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code) if number else str(error), str(path)) from None
        _to_disk(path)
        sums[path.name] = sum_of(path)
    return sums


def _to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk, if the system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
