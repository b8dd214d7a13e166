"""Checkpoints that are damaged or hostile: refused by name, and nothing is changed."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from compare.checkpoint.description import DESCRIPTION, SHARDING
from compare.checkpoint.reader import CheckpointError, CheckpointReader, read_description, sum_of
from tests.support.small_checkpoint import save


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def edit(change: Callable[[dict], object], folder: Path) -> None:
    fields = json.loads((folder / DESCRIPTION).read_text())
    change(fields)
    (folder / DESCRIPTION).write_text(json.dumps(fields))


def flip_a_byte(folder: Path) -> None:
    content = bytearray(first_file(folder).read_bytes())
    content[-3] ^= 1
    first_file(folder).write_bytes(content)


def pickle_instead(folder: Path) -> None:
    first_file(folder).write_bytes(b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.")


def content(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def rewrite(change: Callable[[dict], object], folder: Path, **offsets: str) -> None:
    """A file with other tensors, whose checksum is right."""
    path = first_file(folder)
    tensors, metadata = content(path)
    change(tensors)
    save_file(tensors, path, metadata | offsets)
    edit(lambda fields: fields["files"].update({path.name: msgspec.to_builtins(sum_of(path))}), folder)


OUTSIDE = {"../../x.safetensors": {"bytes": 1, "sha256": "0" * 64}}
DAMAGES: dict[str, Callable[[Path], object]] = {
    f"has no {DESCRIPTION}: it is not a checkpoint": lambda folder: (folder / DESCRIPTION).unlink(),
    "format = 2, and this version reads 1": partial(edit, lambda f: f.update(format=2)),
    "unknown field `code`": partial(edit, lambda f: f.update(code="import os")),
    "matching regex": partial(edit, lambda f: f["files"].update(OUTSIDE)),
    "its files hold 0 of ": partial(edit, lambda f: f["experiment"]["model"].update(n_layer=2)),
    "device-00000-0.safetensors is missing": lambda folder: first_file(folder).unlink(),
    "its contents have changed (sha256): the checkpoint is damaged": flip_a_byte,
    "device-00000-0.safetensors cannot be read": pickle_instead,
    "elements of m/norm.scale": partial(rewrite, lambda tensors: tensors.pop("m/norm.scale")),
    "weights/lm_head is not a tensor of this model and optimizer": partial(
        rewrite, lambda tensors: tensors.update({"weights/lm_head": np.zeros(3)})
    ),
    "weights/norm.scale has values that are NaN or infinite": partial(
        rewrite, lambda tensors: tensors["weights/norm.scale"].__setitem__(0, np.nan)
    ),
    "is of step 7, and the checkpoint of": partial(rewrite, lambda tensors: None, step="7"),
    "m/norm.scale has shape (9,) at (0,), and the tensor (4,)": partial(
        rewrite, lambda tensors: tensors.update({"m/norm.scale": np.zeros(9)})
    ),
}


def test_damage_is_refused_by_name_and_nothing_is_changed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    good = save(tmp_path, 20)
    for number, (says, spoil) in enumerate(DAMAGES.items()):
        copied = Path(shutil.copytree(good, tmp_path / f"copy-{number}" / good.name))
        spoil(copied)
        before = {path.name: path.read_bytes() for path in copied.iterdir()}
        with pytest.raises(CheckpointError) as refused:
            CheckpointReader(copied).verify()
        assert says in str(refused.value)
        assert "\n" not in str(refused.value), says
        assert str(copied) in str(refused.value), says
        assert {path.name: path.read_bytes() for path in copied.iterdir()} == before, says
    assert not (tmp_path / "hacked").exists()


def test_files_that_were_cut_off_are_refused(tmp_path):
    good = save(tmp_path, 20)
    for size in (first_file(good).stat().st_size - 8, 8, 0):
        os.truncate(first_file(good), size)
        with pytest.raises(CheckpointError, match="cannot be read"):
            CheckpointReader(good)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_an_error_of_checkpoints(tmp_path, monkeypatch):
    """The run that it is of may remove it at any time."""
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # as it was a moment ago
    with pytest.raises(CheckpointError, match=r"checkpoint\.json cannot be read: .*No such file"):
        read_description(tmp_path / "step-00000007")


def test_parts_that_overlap_are_refused_when_they_are_read(tmp_path):
    """As many elements as there should be, but some of them twice."""
    folder = save(tmp_path, 20)
    files = first_file(folder), min(folder.glob("device-00001-*.safetensors"))
    ours, theirs = (json.loads(content(file)[1][SHARDING]) for file in files)
    ours["weights/norm.scale"] = theirs["weights/norm.scale"]
    rewrite(lambda tensors: None, folder, **{SHARDING: json.dumps(ours)})
    with pytest.raises(CheckpointError, match=r"parts of weights/norm.scale overlap, and 1 of its elements"):
        CheckpointReader(folder).read("weights", "norm.scale")
