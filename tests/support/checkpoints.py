"""Checkpoints of made-up numbers: no two elements are equal, so that nothing may be in another's place."""

from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from compare.checkpoint.description import CHECKPOINTS, Checkpoint, folder_name, groups
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Saver
from compare.numerics.parameters import parameter_table, storage_dtype
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment

STEP, UPDATES = 7, 5


def random_state(experiment: Experiment) -> dict[tuple[str, str], np.ndarray]:
    """Weights and moments by group and canonical name; squares are not negative."""
    generator, dtype = np.random.default_rng(2), storage_dtype(experiment)
    state = {
        (group, row.name): generator.standard_normal(row.shape).astype(dtype)
        for group in groups(experiment)
        for row in parameter_table(experiment.model)
    }
    return {key: np.abs(values) if key[0] == "v" else values for key, values in state.items()}


def describe(experiment: Experiment) -> Checkpoint:
    return Checkpoint(
        engine="torch-manual", experiment=experiment, step=STEP, updates=UPDATES, corpus_sha256=""
    )


def write_random(folder: Path, experiment: Experiment, **described: Any) -> Path:
    """Save `random_state` as one device does. Returns the folder of the checkpoint.

    `described` are fields of its description.
    """
    saver = Saver(folder / CHECKPOINTS, [0], of=1, keep=1)
    parts = [
        (group, Shard(name=name, device=0, offset=(0,) * array.ndim, shape=array.shape), array)
        for (group, name), array in random_state(experiment).items()
    ]
    saver.save(replace(describe(experiment), **described), parts)
    saver.finish()
    return folder / CHECKPOINTS / folder_name(STEP)


def assert_is_random(folder: Path, experiment: Experiment) -> None:
    reader = CheckpointReader(folder)
    reader.verify()
    for (group, name), array in random_state(experiment).items():
        np.testing.assert_array_equal(reader.read(group, name), array, err_msg=f"{group}/{name}")
