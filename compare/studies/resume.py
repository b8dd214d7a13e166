"""`shardpair resume`: go on with a run from its checkpoints."""

from pathlib import Path
from typing import Annotated

import tyro

from compare.checkpoint.reader import CheckpointError, read_description
from compare.judge.comparison import COMPARISON, read_saved
from compare.spec.experiment import Experiment
from compare.studies.presets import settings_in
from compare.studies.resuming import any_checkpoint
from compare.studies.run import Run


class Resume(Run, frozen=True, kw_only=True):
    """Go on from checkpoints, with the engines of the run or others, on the same layout or another.

    What comes is a run of its own, beside the old one, which nothing is changed in: its first step is the one
    after the checkpoint. Give it more steps than the old one had, or go on with one that was cut off.

    Try:
      shardpair run demo --checkpoint.every 20
      shardpair resume runs/demo-20260101-120000 --train.max_iters 100
      shardpair resume runs/demo-20260101-120000/jax-manual --engines torch-manual --layout.dp_replicate 1
    """

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")] = ""
    """Folder of a run, each of whose engines goes on from its own newest checkpoint, all at the same step; or
    the folder of one engine's run, or a checkpoint, from which all go on. Give it first."""
    resume: tyro.conf.Suppress[str] = ""

    brief = "go on from checkpoints, on any engines and layout"
    default = ""

    @classmethod
    def default_experiment(cls, name: str) -> Experiment:
        """The experiment of the run or checkpoint. Raises RecordError or CheckpointError: there is none."""
        if not name:
            return Experiment()
        if (Path(name) / COMPARISON).is_file():
            return read_saved(Path(name)).experiment
        return read_description(any_checkpoint(Path(name))).experiment

    @classmethod
    def layout_written(cls, name: str) -> frozenset[str]:
        """What the run or checkpoint says of the layout. Raises as `default_experiment`."""
        return settings_in(cls.default_experiment(name).layout)

    @property
    def command(self) -> str:
        """What it makes is a run: `shardpair run --continue` goes on with it."""
        return "run"

    @property
    def source(self) -> str:
        """What is resumed. Raises CheckpointError: nothing was given."""
        if not self.experiment:
            raise CheckpointError("resume: give the folder of a run with --checkpoint.every, or a checkpoint")
        return self.experiment

    def chosen(self) -> tuple[str, ...]:
        """The engines asked for; by default those of the run."""
        if self.engines or not (Path(self.source) / COMPARISON).is_file():
            return self.engines
        return tuple(read_saved(Path(self.source)).requests)
