"""Checkpoint: a folder of tensors, described by checkpoint.json.

    RUN_DIR/checkpoints/step-00000020/
        checkpoint.json                 `Checkpoint`; written last
        device-00003-0.safetensors      parts of weights and moments that device 3 had, by `key`

The content does not depend on the layout that wrote it. Each tensor has its canonical name and shape, and its
boxes cover it once. A file contains at most one box of a tensor. A device whose shard consists of several
boxes (a range of elements) has several files. The file's metadata contains the offset of each box, as
torch.distributed.checkpoint writes it. PyTorch's `HuggingFaceStorageReader` can read the folder.

A checkpoint is written under a temporary name, with checksums, and renamed when it is complete.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from compare.numerics.loss_scale import LossScale
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import parameter_table
from compare.spec.experiment import Experiment
from compare.spec.sections import Count

CHECKPOINTS = "checkpoints"
DESCRIPTION = "checkpoint.json"
UNFINISHED = ".part"
FORMAT = 2
READABLE = (1, 2)
"""Formats that this version reads. Format 1 has no digest of checkpoint.json itself."""
WEIGHTS = "weights"
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # of torch.distributed.checkpoint
STEP = "step"  # in a file's metadata, too, so that files of two checkpoints cannot be mixed

_NAME = re.compile(r"step-(\d{8,})")
FileName = Annotated[str, Meta(pattern=r"^device-\d{5,}-\d+\.safetensors$")]


class FileSum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and checksum of a file of tensors."""

    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Checkpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """checkpoint.json: progress of the training, and size and checksum of every file."""

    format: int = FORMAT
    engine: str
    """Engine that wrote the checkpoint. Any engine may read it."""
    experiment: Experiment
    """Experiment, with the layout of the run."""
    step: Count
    """Number of batches drawn: the next batch is `batch(step)`, and the learning rate follows."""
    updates: Count
    """Number of updates, without skipped steps of float16: Adam's bias correction follows."""
    loss_scale: LossScale | UnsetType = UNSET
    """Loss scale of the next step, in float16."""
    validation_loss: float | UnsetType = UNSET
    """Validation loss of the weights, if they were evaluated at this step."""
    corpus_sha256: str
    """Digest of the training tokens; '' if it is unknown."""
    initial_sha256: str = ""
    """`fingerprint` of the weights with which the run began; '' if it is unknown."""
    created_utc: str = ""
    files: dict[FileName, FileSum] = {}
    sha256: str = ""
    """Digest of all other fields. '' in format 1."""

    @property
    def contradiction(self) -> str:
        """Fields that contradict each other, in words; '' if none do."""
        dtype = self.experiment.precision.dtype
        if self.updates > self.step:
            return f"it has {self.updates} updates after {self.step} steps"
        return f"it has a loss scale in {dtype}" if self.loss_scale and dtype != "float16" else ""


def digest_of(fields: Mapping[str, Any]) -> str:
    """The SHA-256 of all fields but `sha256`, as they are in the file: later versions have more fields."""
    return hashlib.sha256(msgspec.json.encode({**fields, "sha256": ""})).hexdigest()


def key(group: str, name: str) -> str:
    """Name of a tensor in the files: `weights/embedding.token`, `m/embedding.token`."""
    return f"{group}/{name}"


def groups(experiment: Experiment) -> tuple[str, ...]:
    """Groups of a full state: the weights, and each of the optimizer's moments."""
    return (WEIGHTS, *moment_names(experiment.optimizer))


def tensor_shapes(experiment: Experiment) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a full state, by `key`."""
    table = parameter_table(experiment.model)
    return {key(group, row.name): row.shape for group in groups(experiment) for row in table}


def folder_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_in_name(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if the folder has another name."""
    name = _NAME.fullmatch(folder.name)
    return int(name[1]) if name else None


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Checkpoints of a folder by step, oldest first; {} without the folder."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        step = step_in_name(path)
        if step is not None and (path / DESCRIPTION).is_file():
            found[step] = path
    return dict(sorted(found.items()))
