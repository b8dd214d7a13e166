"""What a checkpoint is: a folder of tensors, and checkpoint.json, which says what they are.

    RUN_DIR/checkpoints/step-00000020/
        checkpoint.json                 `Checkpoint`; written last
        device-00003-0.safetensors      parts of weights and moments that device 3 had, by `key`

The layout that wrote it is not part of its meaning: each tensor has its canonical name and shape, and its
parts are boxes that cover it once. A file holds one box of a tensor at most; a device whose share of a
tensor is several boxes (a range of its elements) has several files. Where a box begins stands in the file's
metadata as torch.distributed.checkpoint writes it, whose `HuggingFaceStorageReader` reads such a folder too.

It is written under another name, with checksums, and renamed when all of it is there: a folder with a
checkpoint's name is a whole checkpoint.
"""

import re
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from compare.numerics.loss_scale import LossScale
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import parameter_table
from compare.spec.experiment import Experiment
from compare.spec.sections import Count

CHECKPOINTS = "checkpoints"
DESCRIPTION = "checkpoint.json"
UNFINISHED = ".part"
FORMAT = 1
WEIGHTS = "weights"
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # of torch.distributed.checkpoint
STEP = "step"  # in a file's metadata, too: no file is another checkpoint's

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
    """Engine that wrote it: any other may read it."""
    experiment: Experiment
    """Experiment with the layout that it ran on."""
    step: Count
    """Batches drawn so far: the next one is `batch(step)`, and the schedule follows it."""
    updates: Count
    """Updates of the weights so far, fewer where float16 skipped steps: Adam's bias correction follows it."""
    loss_scale: LossScale | UnsetType = UNSET
    """Loss scale of the next step, in float16."""
    validation_loss: float | UnsetType = UNSET
    """Validation loss of the weights, if they were evaluated at this step."""
    corpus_sha256: str
    """Digest of the training tokens; '' where it is unknown."""
    created_utc: str = ""
    files: dict[FileName, FileSum] = {}


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
    """Folder name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder of them, by step, the oldest first; {} if there is no such folder."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name and (path / DESCRIPTION).is_file():
            found[int(name[1])] = path
    return dict(sorted(found.items()))
