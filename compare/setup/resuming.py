"""`--resume`: the checkpoint that each engine continues from, and checks that it can."""

import contextlib
from collections.abc import Generator, Iterable
from pathlib import Path

from compare.checkpoint.description import (
    CHECKPOINTS,
    DESCRIPTION,
    Checkpoint,
    checkpoints_in,
    step_in_name,
)
from compare.checkpoint.reader import CheckpointError, CheckpointReader, read_description
from compare.contract.request import ResumePoint
from compare.judge.outcome import OUTCOME
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import storage_dtype
from compare.setup.unreadable import advice_for
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import SAME_NUMBERS, Experiment, ExperimentError, differing_keys

MAY_DIFFER = ("layout.", "checkpoint.", "data.", "train.max_iters")
"""Settings that a resumed run may change silently. The data's digest is checked."""


def any_checkpoint(source: Path) -> Path:
    """The checkpoint in a folder, or the newest of a run of one engine.

    Raises CheckpointError: there is none, or there are several engines.
    """
    if (source / DESCRIPTION).is_file():
        return source
    if steps := checkpoints_in(source / CHECKPOINTS):
        return steps[max(steps)]
    engines = [path.parent for path in sorted(source.glob(f"*/{CHECKPOINTS}")) if checkpoints_in(path)]
    if len(engines) == 1:
        return any_checkpoint(engines[0])
    if engines:
        raise CheckpointError(f"{source} is a run of several engines: give one, such as {engines[0]}")
    if advice := advice_for(source):
        raise CheckpointError(f"{source} {advice}")
    raise CheckpointError(
        f"{source}: no checkpoint found: give one, or the folder of a run with "
        f"--checkpoint.every; `shardpair convert` reads nanoGPT's, Hugging Face's and orbax's"
    )


@contextlib.contextmanager
def naming_a_whole_one(folder: Path) -> Generator[None]:
    """A context that reads a checkpoint. If the checkpoint is damaged, the error names an older one.

    Raises CheckpointError.
    """
    try:
        yield
    except CheckpointError as error:
        step = step_in_name(folder)
        older = [path for n, path in checkpoints_in(folder.parent).items() if step is not None and n < step]
        whole = next(filter(_is_whole, reversed(older)), None)
        raise CheckpointError(f"{error}; {whole} is whole: give it" if whole else str(error)) from None


def _is_whole(folder: Path) -> bool:
    try:
        CheckpointReader(folder).verify()
    except CheckpointError:
        return False
    return True


def find_checkpoints(
    source: str, engines: Iterable[str], experiment: Experiment, corpus_sha256: str = ""
) -> dict[str, tuple[Path, Checkpoint]]:
    """Engine -> its checkpoint and the description in it; {} without a source.

    All engines continue from one checkpoint or one engine's run; from a paired run, each from its own newest
    checkpoint of a common step. Raises CheckpointError: there is none, or it is of another training.
    """
    if not source:
        return {}
    if (Path(source) / OUTCOME).is_file():
        own = {name: checkpoints_in(Path(source, name, CHECKPOINTS)) for name in engines}
        common = set.intersection(*map(set, own.values()))
        if not common:
            steps = "; ".join(f"{name} {', '.join(map(str, of)) or 'none'}" for name, of in own.items())
            raise CheckpointError(
                f"--resume {source}: the engines have no checkpoint of the same step ({steps}): give the "
                f"folder of one engine, from which all continue"
            )
        folders = {name: of[max(common)] for name, of in own.items()}
    else:
        folders = dict.fromkeys(engines, any_checkpoint(Path(source)))
    checkpoints = dict[Path, Checkpoint]()
    for folder in dict.fromkeys(folders.values()):
        with naming_a_whole_one(folder):
            checkpoints[folder] = read_description(folder)
        require_continues(checkpoints[folder], experiment, folder, corpus_sha256=corpus_sha256)
    return {name: (folder, checkpoints[folder]) for name, folder in folders.items()}


def find_resume_points(
    source: str, engines: Iterable[str], experiment: Experiment, corpus_sha256: str
) -> dict[str, ResumePoint]:
    """Engine -> its resume point, after all files of the checkpoint were read. Raises CheckpointError."""
    found = find_checkpoints(source, engines, experiment, corpus_sha256)
    for folder in {folder for folder, _ in found.values()}:
        with naming_a_whole_one(folder):
            CheckpointReader(folder).verify()
    return {
        name: ResumePoint(
            checkpoint=str(folder.absolute()),
            step=checkpoint.step,
            loss_scale=checkpoint.loss_scale,
        )
        for name, (folder, checkpoint) in found.items()
    }


def require_resumable(engine: str, source: str, init_from: str = "") -> None:
    """Reject an engine that cannot resume, or other weights. Raises ExperimentError."""
    if source and ENGINES[engine].is_peer:
        raise ExperimentError(
            f"--resume {source}: {engine} cannot begin with a checkpoint: leave it out of --engines"
        )
    if source and init_from:
        raise ExperimentError(
            f"--init_from {init_from} with --resume {source}: a checkpoint has its own weights: give one of "
            f"them"
        )


def require_continues(
    checkpoint: Checkpoint, experiment: Experiment, folder: Path, *, corpus_sha256: str = ""
) -> None:
    """Reject an experiment that is another training than the checkpoint's. Raises CheckpointError.

    Data is compared by digest, unless `corpus_sha256` is ''.
    """
    there, here = checkpoint.experiment, experiment
    model = differing_model(there, here)
    has, wants = (
        f"{of.optimizer.name} ({', '.join(moment_names(of.optimizer)) or '-'})" for of in (there, here)
    )
    dtypes = [storage_dtype(of) for of in (there, here)]
    why = ""
    if model:
        why = f"it has another model: {', '.join(model)}: set --model.* so"
    elif has != wants:
        why = f"it has the state of {has}, not of {wants}: give its weights with --init_from"
    elif dtypes[0] != dtypes[1]:
        why = f"its numbers are {dtypes[0]}: set --precision.dtype {there.precision.dtype}"
    elif there.train.seed != here.train.seed:
        why = f"its data has the order of train.seed = {there.train.seed}, not of {here.train.seed}: set it"
    elif corpus_sha256 and checkpoint.corpus_sha256 and checkpoint.corpus_sha256 != corpus_sha256:
        why = f"it was trained on other tokens than data.source = {here.data.source}: give the same data"
    elif checkpoint.step >= here.train.max_iters:
        why = (
            f"it is at step {checkpoint.step} of train.max_iters = {here.train.max_iters}: raise "
            f"--train.max_iters"
        )
    if why:
        raise CheckpointError(f"--resume {folder}: {why}")


def differing_model(there: Experiment, here: Experiment) -> list[str]:
    """Fields in which two models differ, except dropout and the attention core, which may change."""
    lines = differing_keys(there, here)
    return [
        line
        for line in lines
        if line.startswith("model.") and not line.startswith(("model.dropout", SAME_NUMBERS))
    ]


def changed_settings(source: str, engines: Iterable[str], experiment: Experiment) -> list[str]:
    """Differences from the checkpoint that are allowed and printed."""
    found = find_checkpoints(source, engines, experiment).values()
    changes = {line for _, there in found for line in differing_keys(experiment, there.experiment)}
    return sorted(line for line in changes if not line.startswith(MAY_DIFFER))
