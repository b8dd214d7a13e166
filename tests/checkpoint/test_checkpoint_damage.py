"""Checkpoints that are damaged or hostile: refused by name, and nothing is changed."""

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from compare.checkpoint.description import DESCRIPTION, SHARDING, digest_of
from compare.checkpoint.reader import CheckpointError, CheckpointReader, read_description, sum_of
from tests.support.rows import short
from tests.support.small_checkpoint import save


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def edit(change: Callable[[dict], object], folder: Path) -> None:
    """Change checkpoint.json, with a right digest."""
    fields = json.loads((folder / DESCRIPTION).read_text())
    change(fields)
    fields["sha256"] = digest_of(fields)
    (folder / DESCRIPTION).write_text(json.dumps(fields))


def flip_in_description(folder: Path) -> None:
    """One flipped bit in a number: learning_rate 1e-3 becomes another."""
    path = folder / DESCRIPTION
    text = path.read_bytes()
    place = text.index(b'"learning_rate":') + len(b'"learning_rate":')
    while not 0x31 <= text[place] <= 0x39:
        place += 1
    path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])


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
    "format = 3, and this version reads 2": partial(edit, lambda f: f.update(format=3)),
    f"{DESCRIPTION}: it has changed since it was written (sha256)": flip_in_description,
    "updates after": partial(edit, lambda f: f.update(updates=f["step"] + 1)),
    "is not zero, and the checkpoint has 0 updates": partial(edit, lambda f: f.update(updates=0)),
    "it has a loss scale in float": partial(
        edit, lambda f: f.update(loss_scale={"scale": 8.0, "good_steps": 0, "hysteresis": 1})
    ),
    "v/norm.scale has negative values": partial(
        rewrite, lambda tensors: tensors["v/norm.scale"].__setitem__(0, -1.0)
    ),
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


@pytest.fixture
def good(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save(tmp_path, 20)


@pytest.mark.parametrize("words", DAMAGES, ids=short)
def test_damage_is_named_and_kept(good, tmp_path, words):
    DAMAGES[words](good)
    before = {path.name: path.read_bytes() for path in good.iterdir()}
    with pytest.raises(CheckpointError) as refused:
        CheckpointReader(good).verify()
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(good) in str(refused.value)
    assert {path.name: path.read_bytes() for path in good.iterdir()} == before
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("keep", [-8, 8, 0])
def test_truncated_file_is_rejected(good, keep):
    os.truncate(first_file(good), keep if keep >= 0 else first_file(good).stat().st_size + keep)
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointReader(good)


def test_removed_while_it_is_read(tmp_path, monkeypatch):
    """The run that it is of may remove it at any time."""
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # as it was a moment ago
    with pytest.raises(CheckpointError, match=r"checkpoint\.json cannot be read: .*No such file"):
        read_description(tmp_path / "step-00000007")


def test_overlapping_parts_are_rejected(good):
    """As many elements as there should be, but some of them twice."""
    files = first_file(good), min(good.glob("device-00001-*.safetensors"))
    ours, theirs = (json.loads(content(file)[1][SHARDING]) for file in files)
    ours["weights/norm.scale"] = theirs["weights/norm.scale"]
    rewrite(lambda tensors: None, good, **{SHARDING: json.dumps(ours)})
    with pytest.raises(CheckpointError, match=r"parts of weights/norm.scale overlap, and 1 of its elements"):
        CheckpointReader(good).read("weights", "norm.scale")


def test_flipped_bit_of_description_has_no_effect(good):
    """A flipped bit is rejected, or it changes nothing, such as white space."""
    path = good / DESCRIPTION
    content, written, accepted = path.read_bytes(), read_description(good), 0
    for bit in range(0, 8 * len(content), 29):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with contextlib.suppress(CheckpointError):
            assert read_description(good) == written
            accepted += 1
    assert accepted < 8 * len(content) / 29 / 50


def test_format_without_digest_is_read(good):
    fields = json.loads((good / DESCRIPTION).read_text())
    (good / DESCRIPTION).write_text(json.dumps(fields | {"format": 1, "sha256": ""}))
    CheckpointReader(good).verify()


def test_folder_is_named_after_its_step(good):
    moved = good.rename(good.with_name("step-00000030"))
    with pytest.raises(CheckpointError, match="its folder is named after step 30, and it is of step 20"):
        CheckpointReader(moved)


def test_checkpoint_of_an_older_version_is_read(tmp_path):
    """It lacks fields that this version has added. Its digest is of the fields in the file."""
    folder = save(tmp_path, 5)
    edit(lambda fields: fields["experiment"]["model"].pop("balance"), folder)
    CheckpointReader(folder).verify()
