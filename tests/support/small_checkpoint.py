"""A small experiment's checkpoints: three devices, which have a third of each tensor, save them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from compare.checkpoint.description import Checkpoint, folder_name
from compare.checkpoint.saver import Part, Saver
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, Model, Precision
from tests.support.assembly import cut
from tests.support.checkpoints import random_state

EXPERIMENT = Experiment(
    model=Model(n_layer=1, n_head=2, n_embd=4, block_size=3, vocab_size=5),
    precision=Precision(dtype="float64"),
)
DEVICES = 3


def parts(device: int) -> Iterator[Part]:
    """A third of each tensor's elements, in a turned order, and a copy of what device 0 has."""
    for (group, name), tensor in random_state(EXPERIMENT).items():
        shape, size = tensor.shape, tensor.size
        ends = [size * number // DEVICES for number in range(DEVICES + 1)]
        shard = Shard(
            name=name,
            device=device,
            offset=(0,) * len(shape),
            shape=shape,
            elements=(ends[device], ends[device + 1]),
            dim_order=tuple(range(len(shape)))[::-1],
        )
        yield group, shard, cut(tensor, shard)
        copy = msgspec.structs.replace(shard, elements=(ends[0], ends[1]), replica=1)
        yield group, copy, cut(tensor, copy) + np.nan  # of a copy nothing may be written


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        engine="jax-manual", experiment=EXPERIMENT, step=step, updates=step - 1, corpus_sha256="c"
    )


def save(folder: Path, *steps: int, keep: int = 2) -> Path:
    """Checkpoints by three processes, which are threads here. Returns the last one's folder."""
    all_savers = [Saver(folder, [device], of=DEVICES, keep=keep) for device in range(DEVICES)]
    for step in steps:
        for device, saver in enumerate(all_savers):
            saver.save(checkpoint(step), parts(device))
        for saver in all_savers:
            saver.finish()
    return folder / folder_name(steps[-1])
