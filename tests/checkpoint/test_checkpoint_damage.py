"""Checkpoints that are damaged or hostile: refused by name, and nothing is changed."""

import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from small_checkpoint import save

from compare.checkpoint.description import DESCRIPTION, SHARDING
from compare.checkpoint.reader import CheckpointError, CheckpointReader, read_description, sum_of


@pytest.fixture
def copied(tmp_path) -> Path:
    """A checkpoint to spoil."""
    return save(tmp_path, 20)


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


def not_a_number(found: dict) -> None:
    found["weights/norm.scale"][0] = np.nan


def negative(found: dict) -> None:
    found["v/norm.scale"][0] = -1e-9


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
        (partial(edit, change=lambda f: f.update(step=2**80)), "Expected `int` <= "),
        (
            partial(edit, change=lambda f: f.update(updates=21)),
            "updates = 21 after step = 20: each step",
        ),
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
        (
            partial(rewrite, change=not_a_number),
            "weights/norm.scale has values that are NaN or infinite",
        ),
        (
            partial(rewrite, change=negative),
            "v/norm.scale has values that are negative",
        ),
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


def test_one_that_is_removed_while_it_is_read_is_an_error_of_checkpoints(tmp_path, monkeypatch):
    """The run that it is of may remove it at any time."""
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # as it was a moment ago
    with pytest.raises(CheckpointError, match=r"checkpoint\.json cannot be read: .*No such file"):
        read_description(tmp_path / "step-00000007")


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
