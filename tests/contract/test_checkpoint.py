"""Checkpoints: what is saved comes back in any part; what is damaged or hostile is refused by name."""

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from compare.contract.boxes import Box
from compare.contract.checkpoint import saver as savers
from compare.contract.checkpoint.description import (
    DESCRIPTION,
    SHARDING,
    Checkpoint,
    checkpoints_in,
    folder_name,
    groups,
    key,
    tensor_shapes,
)
from compare.contract.checkpoint.reader import CheckpointError, CheckpointReader, sum_of
from compare.contract.checkpoint.saver import Part, Saver, remove_unfinished
from compare.contract.experiment import Experiment, Model, Precision
from compare.contract.host.disk import DiskFull
from compare.contract.parameters import parameter_table
from compare.contract.shards import Shard, cut

EXPERIMENT = Experiment(
    model=Model(n_layer=1, n_head=2, n_embd=4, block_size=3, vocab_size=5),
    precision=Precision(dtype="float64"),
)
DEVICES = 3


def tensors() -> dict[tuple[str, str], np.ndarray]:
    generator = np.random.default_rng(1)
    table = parameter_table(EXPERIMENT.model)
    return {
        (group, row.name): generator.standard_normal(row.shape)
        for group in groups(EXPERIMENT)
        for row in table
    }


def parts(device: int) -> Iterator[Part]:
    """A third of each tensor's elements, in a turned order, and a copy of what device 0 has."""
    for (group, name), tensor in tensors().items():
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), 20)


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def test_what_is_saved_comes_back_whole_and_in_any_part(saved):
    reader = CheckpointReader(saved)
    reader.verify()
    found = reader.description
    assert (found.step, found.updates, found.corpus_sha256, found.experiment) == (20, 19, "c", EXPERIMENT)
    for (group, name), tensor in tensors().items():
        np.testing.assert_array_equal(reader.read(group, name), tensor)
    qkv = tensors()["v", "blocks.0.attention.qkv.weight"]
    box = Box((1, 0, 1, 0), (2, 3, 1, 2))
    np.testing.assert_array_equal(reader.read("v", "blocks.0.attention.qkv.weight", box), qkv[box.slices])
    assert dict(reader.group("weights")).keys() == {row.name for row in parameter_table(EXPERIMENT.model)}


def test_pytorch_reads_it_too(saved):
    """torch.distributed.checkpoint takes the folder for one of its own."""
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    into = {key(*name): torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in tensors().items()}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
    for name, tensor in tensors().items():
        np.testing.assert_array_equal(into[key(*name)].numpy(), tensor)


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    save(tmp_path, 5, 10, 15, 20, keep=2)
    assert list(checkpoints_in(tmp_path)) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(15), folder_name(20)]
    names = {path.name for path in (tmp_path / folder_name(20)).iterdir()}
    assert names == {DESCRIPTION, *CheckpointReader(tmp_path / folder_name(20)).description.files}


def test_a_save_that_was_cut_off_is_no_checkpoint_and_the_one_before_is_whole(tmp_path):
    save(tmp_path, 5)
    alone = Saver(tmp_path, [1], of=DEVICES, keep=2)  # the others were killed
    alone.save(checkpoint(10), parts(1))
    alone.finish()
    assert list(checkpoints_in(tmp_path)) == [5]
    CheckpointReader(tmp_path / folder_name(5)).verify()
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder_name(5)]


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    may_write, write = threading.Event(), savers._write_device

    def slowly(*args):
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(savers, "_write_device", slowly)
    saver = Saver(tmp_path, [0], of=1, keep=1)
    held = [
        (group, msgspec.structs.replace(shard, elements=None, dim_order=()), tensors()[group, shard.name])
        for group, shard, _ in parts(0)
        if not shard.replica
    ]
    saver.save(checkpoint(5), held)  # returns, though nothing is written yet
    assert not checkpoints_in(tmp_path)
    may_write.set()
    saver.finish()
    assert list(checkpoints_in(tmp_path)) == [5]


def test_a_full_disk_is_said_and_the_one_before_is_whole(tmp_path, monkeypatch):
    save(tmp_path, 5)

    def full(tensors, path, metadata):
        raise savers.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(savers, "save_file", full)
    saver = Saver(tmp_path, [0], of=1, keep=1)
    saver.save(checkpoint(10), parts(0))
    with pytest.raises(DiskFull, match="no space left on the device"):
        saver.finish()
    assert list(checkpoints_in(tmp_path)) == [5]
    saver.finish()  # it is said once


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    fields = json.loads((folder / DESCRIPTION).read_text())
    change(fields)
    (folder / DESCRIPTION).write_text(json.dumps(fields))


def flip_a_byte(folder: Path) -> None:
    content = bytearray(first_file(folder).read_bytes())
    content[-3] ^= 1
    first_file(folder).write_bytes(content)


def truncate(folder: Path) -> None:
    os.truncate(first_file(folder), first_file(folder).stat().st_size - 8)


def huge_header(folder: Path) -> None:
    first_file(folder).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def pickle_instead(folder: Path) -> None:
    first_file(folder).write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.")


def link_elsewhere(folder: Path) -> None:
    path = first_file(folder)
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def content(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    """A file with other tensors, whose checksum is right."""
    path = first_file(folder)
    found, metadata = content(path)
    change(found)
    save_file(found, path, metadata)
    edit(folder, lambda fields: fields["files"].update({path.name: msgspec.to_builtins(sum_of(path))}))


def other_dtype(found: dict) -> None:
    found["m/norm.scale"] = found["m/norm.scale"].astype(np.float32)


def unknown_tensor(found: dict) -> None:
    found["weights/lm_head"] = np.zeros(3)


def larger_tensor(found: dict) -> None:
    found["m/norm.scale"] = np.zeros(9)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / DESCRIPTION).unlink(), f"has no {DESCRIPTION}: it is no checkpoint"),
        (lambda folder: (folder / DESCRIPTION).write_text("{"), f"{DESCRIPTION} cannot be read: "),
        (lambda folder: (folder / DESCRIPTION).write_text("[" * 100_000), f"{DESCRIPTION} cannot be read: "),
        (partial(edit, change=lambda f: f.update(format=2)), "format = 2, and this version reads 1"),
        (partial(edit, change=lambda f: f.update(step=-1)), "Expected `int` >= 0"),
        (partial(edit, change=lambda f: f.update(step="x")), "Expected `int`, got `str`"),
        (partial(edit, change=lambda f: f.pop("engine")), "missing required field `engine`"),
        (partial(edit, change=lambda f: f.update(code="import os")), "unknown field `code`"),
        (
            partial(
                edit,
                change=lambda f: f["files"].update({"../../x.safetensors": {"bytes": 1, "sha256": "0" * 64}}),
            ),
            "matching regex",
        ),
        (partial(edit, change=lambda f: f["experiment"]["model"].update(n_layer=10**9)), "cannot be read: "),
        (partial(edit, change=lambda f: f["experiment"]["model"].update(n_layer=2)), "its files hold 0 of "),
        (lambda folder: first_file(folder).unlink(), "device-00000-0.safetensors is missing"),
        (flip_a_byte, "its contents have changed (sha256): the checkpoint is damaged"),
        (truncate, "device-00000-0.safetensors cannot be read"),
        (huge_header, "device-00000-0.safetensors cannot be read"),
        (pickle_instead, "device-00000-0.safetensors cannot be read"),
        (link_elsewhere, "device-00000-0.safetensors is missing"),
        (lambda folder: first_file(folder).write_bytes(b""), "device-00000-0.safetensors cannot be read"),
        (partial(rewrite, change=lambda found: found.pop("m/norm.scale")), "elements of m/norm.scale"),
        (partial(rewrite, change=other_dtype), "m/norm.scale is F32 instead of float64"),
        (partial(rewrite, change=unknown_tensor), "weights/lm_head is no tensor of this model and optimizer"),
        (partial(rewrite, change=larger_tensor), "m/norm.scale has shape (9,) at (0,), and the tensor (4,)"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_nothing_is_changed(copied, spoil, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    spoil(copied)
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    with pytest.raises(CheckpointError) as refused:
        CheckpointReader(copied).verify()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(copied) in str(refused.value)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before
    assert not (tmp_path / "hacked").exists()


def test_parts_that_overlap_are_refused_when_they_are_read(copied):
    """As many elements as there should be, but some of them twice."""
    path, other = first_file(copied), min(copied.glob("device-00001-*.safetensors"))
    found, metadata = content(path)
    own, theirs = (json.loads(content(file)[1][SHARDING]) for file in (path, other))
    own["weights/norm.scale"] = theirs["weights/norm.scale"]
    save_file(found, path, {**metadata, SHARDING: json.dumps(own)})
    edit(copied, lambda fields: fields["files"].update({path.name: msgspec.to_builtins(sum_of(path))}))
    reader = CheckpointReader(copied)
    with pytest.raises(CheckpointError, match=r"parts of weights/norm.scale overlap, and 1 of its elements"):
        reader.read("weights", "norm.scale")


def test_shapes_are_those_of_weights_and_moments():
    shapes = tensor_shapes(EXPERIMENT)
    assert len(shapes) == 3 * len(parameter_table(EXPERIMENT.model))
    assert shapes["v/embedding.token"] == (5, 4)
