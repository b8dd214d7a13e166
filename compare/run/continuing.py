"""`--continue` of a case that was stopped: continue its record from its newest checkpoint, or begin again."""

import shutil
from pathlib import Path

from msgspec import UNSET, UnsetType

from compare.checkpoint.description import CHECKPOINTS, checkpoints_in
from compare.checkpoint.reader import CheckpointError, CheckpointReader
from compare.contract.record import STEPS_PART, Step, cut_record, read_lines
from compare.contract.request import Request, ResumePoint
from compare.execute.launch import EngineError
from compare.side.run_lock import lock_folder
from compare.spec.engines.registry import ENGINES
from compare.system.tensors import RecordError


def make_room(request: Request, folder: Path) -> ResumePoint | UnsetType:
    """Prepare the folder of a case. Returns the checkpoint to continue from, or UNSET for an empty place.

    The record is cut after the checkpoint's step. If it does not reach that far, or a file is damaged, the
    case begins again; a folder with checkpoints is then kept as FOLDER.unfinished-1.

    Raises EngineError: the folder is a link, behind which nothing is removed.
    """
    if folder.is_symlink():
        raise EngineError(f"{folder} is a link: remove it, and the case is trained in its place", exit_code=2)
    if (folder / CHECKPOINTS).exists():
        with lock_folder(folder):
            if point := _point_to_continue(request, folder):
                return point
            names = (folder.with_name(f"{folder.name}.unfinished-{number}") for number in range(1, 1000))
            folder.rename(next(path for path in names if not path.exists()))
    shutil.rmtree(folder, ignore_errors=True)
    return UNSET


def _point_to_continue(request: Request, folder: Path) -> ResumePoint | UnsetType:
    """The newest checkpoint, if the record up to its step is whole, and steps are left; the record is cut."""
    saved = checkpoints_in(folder / CHECKPOINTS)
    if not saved or request.profile or ENGINES[request.engine].is_peer:
        return UNSET
    try:
        reader = CheckpointReader(saved[max(saved)])
        reader.verify()
        there = reader.description
        is_own = there.engine == request.engine and there.experiment == request.experiment
        is_own &= there.corpus_sha256 == request.corpus_sha256 and bool(there.initial_sha256)
        steps = [line.step for line in read_lines(folder / STEPS_PART, Step, may_be_torn=True)]
        before = range(request.first_step, there.step)
        has_steps = steps[: len(before)] == [*before] and len(before) > 0
        if not is_own or not has_steps or there.step == request.experiment.train.max_iters:
            return UNSET
        cut_record(folder, there.step)
    except (CheckpointError, RecordError):
        return UNSET
    checkpoint = str(reader.folder.absolute())
    return ResumePoint(checkpoint=checkpoint, step=there.step, loss_scale=there.loss_scale)
