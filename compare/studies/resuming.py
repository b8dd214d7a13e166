"""`--resume`: which checkpoint each engine of a run goes on from, and whether it can."""

from collections.abc import Iterable
from pathlib import Path

from compare.checkpoint.description import CHECKPOINTS, DESCRIPTION, Checkpoint, checkpoints_in
from compare.checkpoint.reader import CheckpointError, CheckpointReader, read_description
from compare.contract.request import ResumePoint
from compare.judge.acceptance import differing_keys
from compare.judge.outcome import OUTCOME
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import storage_dtype
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError

LISTED = 3
MAY_DIFFER = ("layout.", "checkpoint.", "data.", "train.max_iters")
"""What a resumed run may ask for differently without a word; of the data the digest counts."""


def checkpoints_for(source: Path, engines: Iterable[str]) -> dict[str, Path]:
    """The checkpoint that each engine goes on from.

    Args:
        source: a checkpoint, or the folder of an engine's run, for all of them; or that of a paired run,
            where each has its own: the newest after the same step.
        engines: that are to go on.

    Raises:
        CheckpointError: there is none, or no step after which all have one.
    """
    engines = list(engines)
    if not (source / OUTCOME).is_file():
        return dict.fromkeys(engines, any_checkpoint(source))
    own = {name: checkpoints_in(source / name / CHECKPOINTS) for name in engines}
    if without := [name for name, found in own.items() if not found]:
        having = [
            path.parent.name for path in sorted(source.glob(f"*/{CHECKPOINTS}")) if checkpoints_in(path)
        ]
        advice = f"{source / having[0]}, from which all of them go on" if having else "another run"
        raise CheckpointError(f"--resume {source}: {without[0]} has no checkpoint there: give {advice}")
    common = set.intersection(*(set(found) for found in own.values()))
    if not common:
        have = "; ".join(f"{name} {_some(map(str, found))}" for name, found in own.items())
        raise CheckpointError(
            f"--resume {source}: there is no step after which all have a checkpoint ({have}): give one of "
            f"them, such as {source / engines[0]}"
        )
    return {name: found[max(common)] for name, found in own.items()}


def any_checkpoint(source: Path) -> Path:
    """A checkpoint as it is, or the newest one of an engine's run. Raises CheckpointError: there is none."""
    if (source / DESCRIPTION).is_file():
        return source
    if found := checkpoints_in(source / CHECKPOINTS):
        return found[max(found)]
    raise CheckpointError(
        f"{source}: no checkpoint is there: give a checkpoint, or the folder of a run with --checkpoint.every"
    )


def resumes(
    source: str, engines: Iterable[str], experiment: Experiment, corpus_sha256: str
) -> dict[str, ResumePoint]:
    """What each engine is asked to go on from, after every file of it was read; {} without a source.

    Raises:
        CheckpointError: one line: no checkpoint, a damaged one, or one of another training.
    """
    if not source:
        return {}
    found = checkpoints_for(Path(source), engines)
    for folder in dict.fromkeys(found.values()):
        reader = CheckpointReader(folder)
        require_continues(reader.description, experiment, folder, corpus_sha256=corpus_sha256)
        reader.verify()
    return {name: _resume(folder) for name, folder in found.items()}


def require_resumable(engine: str, source: str, init_from: str = "") -> None:
    """Refuse what cannot go on from a checkpoint. Raises ExperimentError."""
    if source and not ENGINES[engine].can.checkpoints:
        raise ExperimentError(
            f"--resume {source}: {engine} cannot begin with a checkpoint: leave it out of --engines"
        )
    if source and init_from:
        raise ExperimentError(
            f"--init_from {init_from} beside --resume {source}: a checkpoint has its own weights: give one"
        )


def require_continues(
    checkpoint: Checkpoint, experiment: Experiment, folder: Path, *, corpus_sha256: str = ""
) -> None:
    """Refuse an experiment that is another training than the checkpoint's.

    Args:
        checkpoint: its description.
        experiment: that is to go on with it.
        folder: of the checkpoint.
        corpus_sha256: of the experiment's data; '' to leave the data alone.

    Raises:
        CheckpointError: one line with what is different.
    """
    there = checkpoint.experiment

    def refuse(why: str) -> None:
        raise CheckpointError(f"--resume {folder}: {why}")

    different = [line for line in differing_keys(there, experiment) if line.startswith("model.")]
    # Dropout is the training's and not the weights'.
    if different := [line for line in different if not line.startswith("model.dropout")]:
        refuse(f"it is of another model: {_some(different)}")
    if there.optimizer.name != experiment.optimizer.name or moment_names(there.optimizer) != moment_names(
        experiment.optimizer
    ):
        refuse(
            f"it has the state of {there.optimizer.name} ({', '.join(moment_names(there.optimizer)) or '-'})"
            f", and {experiment.optimizer.name} is asked for: begin anew with --init_from"
        )
    if storage_dtype(there) != storage_dtype(experiment):
        refuse(
            f"its numbers are {storage_dtype(there)}, and precision.dtype = {experiment.precision.dtype} "
            f"keeps {storage_dtype(experiment)}: set --precision.dtype {there.precision.dtype}"
        )
    if there.train.seed != experiment.train.seed:
        refuse(
            f"its data comes in the order of train.seed = {there.train.seed}, not of {experiment.train.seed}"
        )
    if corpus_sha256 and checkpoint.corpus_sha256 and checkpoint.corpus_sha256 != corpus_sha256:
        refuse(
            f"it was trained on other tokens than data.source = {experiment.data.source} has: give those, or "
            f"begin anew with --init_from"
        )
    if checkpoint.step >= experiment.train.max_iters:
        refuse(
            f"it is at step {checkpoint.step} of train.max_iters = {experiment.train.max_iters}: nothing is "
            f"left to train; raise --train.max_iters"
        )


def objection_to_resume(source: str, engines: Iterable[str], experiment: Experiment) -> str:
    """What is wrong with checkpoints, as far as it shows without reading all of them; '' if nothing is."""
    try:
        for name, folder in checkpoints_for(Path(source), engines).items():
            require_resumable(name, source)
            require_continues(read_description(folder), experiment, folder)
    except ExperimentError as error:
        return str(error)
    return ""


def changed_settings(source: str, engines: Iterable[str], experiment: Experiment) -> list[str]:
    """What a resumed run asks for differently, and may, but not without a word: [] without a source.

    Raises:
        CheckpointError: there is no checkpoint, or it is one of another training.
    """
    changes = set()
    for folder in dict.fromkeys(checkpoints_for(Path(source), engines).values()) if source else ():
        description = read_description(folder)
        require_continues(description, experiment, folder)
        changes |= set(differing_keys(experiment, description.experiment))
    return sorted(line for line in changes if not line.startswith(MAY_DIFFER))


def _resume(folder: Path) -> ResumePoint:
    description = read_description(folder)
    return ResumePoint(
        checkpoint=str(folder.absolute()),
        step=description.step,
        updates=description.updates,
        loss_scale=description.loss_scale,
    )


def _some(words: Iterable[str]) -> str:
    words = list(words)
    more = f" and {len(words) - LISTED} more" if len(words) > LISTED else ""
    return ", ".join(words[:LISTED]) + more
