"""Checkpoints: any part of a saved state can be read; an interrupted save leaves no checkpoint."""

import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from compare.checkpoint import saver as savers
from compare.checkpoint.description import (
    CHECKPOINTS,
    DESCRIPTION,
    UNFINISHED,
    checkpoints_in,
    folder_name,
    key,
)
from compare.checkpoint.reader import CheckpointReader
from compare.checkpoint.saver import Saver, UnfinishedError
from compare.contract.request import REQUEST, Request, read_request
from compare.numerics.boxes import Box
from compare.numerics.parameters import parameter_table
from compare.side.process_states import State, name_of_device
from compare.spec.experiment import Checkpoints, ExperimentError
from compare.system.json_files import write_json
from tests.support.checkpoints import random_state
from tests.support.small_checkpoint import DEVICES, EXPERIMENT, checkpoint, parts, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), 20)


def test_saved_state_is_read_in_any_part(saved):
    reader = CheckpointReader(saved)
    reader.verify()
    found = reader.description
    assert (found.step, found.updates, found.corpus_sha256, found.experiment) == (20, 19, "c", EXPERIMENT)
    for (group, name), tensor in random_state(EXPERIMENT).items():
        np.testing.assert_array_equal(reader.read(group, name), tensor)
    qkv = random_state(EXPERIMENT)["v", "blocks.0.attention.qkv.weight"]
    box = Box((1, 0, 1, 0), (2, 3, 1, 2))
    np.testing.assert_array_equal(reader.read("v", "blocks.0.attention.qkv.weight", box), qkv[box.slices])
    assert dict(reader.group("weights")).keys() == {row.name for row in parameter_table(EXPERIMENT.model)}


@pytest.mark.slow
def test_pytorch_reads_it_too(saved):
    """torch.distributed.checkpoint takes the folder for one of its own."""
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    into = {
        key(*name): torch.zeros(tensor.shape, dtype=torch.float64)
        for name, tensor in random_state(EXPERIMENT).items()
    }
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    for name, tensor in random_state(EXPERIMENT).items():
        np.testing.assert_array_equal(into[key(*name)].numpy(), tensor)


def test_the_newest_are_kept(tmp_path):
    save(tmp_path, 5, 10, 15, 20, keep=2)
    assert list(checkpoints_in(tmp_path)) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(15), folder_name(20)]
    names = {path.name for path in (tmp_path / folder_name(20)).iterdir()}
    assert names == {DESCRIPTION, *CheckpointReader(tmp_path / folder_name(20)).description.files}


def test_interrupted_save_is_no_checkpoint(tmp_path):
    save(tmp_path, 5)
    alone = Saver(tmp_path, [1], of=DEVICES, keep=2)  # the others were killed
    alone.save(checkpoint(10), parts(1))
    alone.finish()
    assert list(checkpoints_in(tmp_path)) == [5]
    CheckpointReader(tmp_path / folder_name(5)).verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(5), folder_name(10) + UNFINISHED]


def test_process_that_writes_nothing_is_named(tmp_path):
    """A host that has lost the file system of the run goes on, and the first process waits for its files."""
    states = {number: State(number=number, host=f"host{number}") for number in range(2)}
    assert name_of_device(2, states, devices=4) == "device 2 (process 1 on host1)"
    assert name_of_device(2, {}, devices=4) == "device 2"
    first, *others = (
        Saver(tmp_path, [device], of=DEVICES, keep=2, patience_s=0.0, name_of="device {} (of host1)".format)
        for device in range(DEVICES)
    )
    first.save(checkpoint(10), parts(0))
    with pytest.raises(
        UnfinishedError, match=r"^device 1 \(of host1\) wrote no files of a checkpoint for 0 s"
    ):
        first.finish()
    for device, saver in enumerate(others, 1):
        saver.save(checkpoint(10), parts(device))
        saver.finish()
    while not checkpoints_in(tmp_path):
        time.sleep(0.01)
    first.finish()


def test_training_continues_during_a_save(tmp_path, monkeypatch):
    may_write, write = threading.Event(), savers.save_file

    def slowly(*args, **options):
        assert may_write.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(savers, "save_file", slowly)
    saver = Saver(tmp_path, [0], of=1, keep=1)
    replace = msgspec.structs.replace
    tensors = [
        (group, replace(shard, elements=None, dim_order=()), random_state(EXPERIMENT)[group, shard.name])
        for group, shard, _ in parts(0)
        if not shard.replica
    ]
    saver.save(checkpoint(5), tensors)  # returns, though nothing is written yet
    assert not checkpoints_in(tmp_path)
    may_write.set()
    saver.finish()
    assert list(checkpoints_in(tmp_path)) == [5]


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def full(tensors, path, metadata):
        raise savers.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(savers, "save_file", full)
    saver = Saver(tmp_path, [0], of=1, keep=1)
    saver.save(checkpoint(10), parts(0))
    with pytest.raises(OSError, match="No space left on device"):
        saver.finish()
    assert list(checkpoints_in(tmp_path)) == [5]
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(5)]  # room was made
    saver.finish()  # the error is raised once


def test_old_checkpoints_are_rejected(tmp_path, tiny):
    save(tmp_path / CHECKPOINTS, 5)
    experiment = msgspec.structs.replace(tiny, checkpoint=Checkpoints(every=1))
    write_json(tmp_path / REQUEST, Request(engine="jax-manual", experiment=experiment))
    with pytest.raises(ExperimentError, match="holds checkpoints of an earlier run"):
        read_request(tmp_path, "jaxpar")
