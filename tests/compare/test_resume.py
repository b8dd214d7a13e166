"""Runs that stop and go on: on the same layout bit for bit, on others and in other engines to 1e-10."""

import json
import shutil
from pathlib import Path

import pytest

from compare.checkpoint.description import CHECKPOINTS, folder_name, groups
from compare.checkpoint.reader import CheckpointReader
from compare.contract.record import read_record
from compare.judge.rungs import NAMED
from compare.judge.verdict import errors_by_place
from compare.spec.experiment import Experiment, edited, to_toml
from tests.support.checkpoints import write_random

ENGINES = ("torch-manual", "jax-manual", "torch-library")
"""One of jaxpar: test_jaxpar_layouts.py restores and saves the state of all three engines."""
HALF, ALL = 3, 6


@pytest.fixture
def spec(tiny, shardpair) -> Experiment:
    changes = {"model": {"dropout": 0.2}, "train": {"max_iters": ALL}, "checkpoint": {"every": HALF}}
    made = edited(tiny, changes)
    (shardpair.folder / "tiny.toml").write_text(to_toml(made))
    return made


def of(run: Path, engine: str, step: int) -> Path:
    return run / engine / CHECKPOINTS / folder_name(step)


def difference(found: Path, expected: Path) -> dict[str, float]:
    """The largest relative error of any tensor, of the weights and of each moment."""
    readers = [CheckpointReader(folder) for folder in (found, expected)]
    return {
        group: max(errors_by_place(NAMED["gradients"], *(reader.group(group) for reader in readers)))[0]
        for group in groups(readers[0].description.experiment)
    }


def test_a_run_goes_on_where_it_was(spec, shardpair):
    """Uninterrupted; on the same layout; from another engine, on another layout and fewer devices.

    Without ladders: their first step also returns the gradients, which in JAX is another program, with other
    rounding, and takes as long again to compile.
    """
    fsdp = ("--layout.dp_shard", "2", "--layout.zero", "3", "--no_ladder")
    done = shardpair("run", "tiny.toml", *fsdp, "--run_dir", "whole", "--engines", *ENGINES)
    assert done.returncode == 0, done.stderr
    whole, cut = shardpair.folder / "whole", shardpair.folder / "cut"
    shutil.copytree(whole, cut)
    for engine in ENGINES:  # as if it had been killed after half of it
        shutil.rmtree(of(cut, engine, ALL))

    done = shardpair("resume", "cut", "--run_dir", "same", "--no_ladder")
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout
    same = shardpair.folder / "same"
    for engine in ENGINES:
        assert difference(of(same, engine, ALL), of(whole, engine, ALL)) == {"weights": 0, "m": 0, "v": 0}
        numbers = [
            [(s.step, s.loss, s.grad_norm, s.lr) for s in read_record(f / engine).steps]
            for f in (same, whole)
        ]
        assert numbers[0] == numbers[1][HALF:]

    split = ("--layout.dp_shard", "1", "--layout.zero", "0", "--layout.tp", "2", "--no_ladder")
    moved = ("resume", "cut/torch-library", "--run_dir", "moved")
    done = shardpair(*moved, "--engines", *ENGINES, *split)
    assert done.returncode == 0, done.stderr
    for engine in ENGINES:
        found = difference(of(shardpair.folder / "moved", engine, ALL), of(whole, engine, ALL))
        assert max(found.values()) < 1e-10, (engine, found)

    back = ("run", "tiny.toml", "--resume", "moved/jax-manual", "--run_dir", "back", "--no_ladder")
    done = shardpair(*back, "--engines", "torch-manual", "--train.max_iters", "8", "--train.batch_size", "2")
    assert done.returncode == 0, done.stderr
    assert "resumed with train.batch_size = 2 instead of 4" in done.stderr
    assert [step.step for step in read_record(shardpair.folder / "back/torch-manual").steps] == [6, 7]


def test_resume_rejects_other_trainings(spec, shardpair, tmp_path):
    given = write_random(tmp_path / "given", edited(spec, {"layout": {}}))

    def refused(*arguments: str) -> str:
        done = shardpair(*arguments)
        assert done.returncode == 2, (arguments, done.stderr, done.stdout)
        changed = done.stderr.startswith("resumed with model.dropout = 0.0 instead of 0.2")
        assert done.stderr.count("\n") == 1 + changed, done.stderr
        assert not (tmp_path / "no").exists()
        return done.stderr

    run = ("run", "tiny.toml", "--run_dir", "no", "--resume", str(given), "--engines", "torch-manual")
    missing = "nowhere does not exist: give a file or a folder"
    assert missing in refused("run", "tiny.toml", "--run_dir", "no", "--resume", "nowhere")
    assert "give the folder of a run" in refused("resume")
    assert missing in refused("resume", "nowhere")
    assert "it has another model: model.n_layer = 2 instead of 4" in refused(*run, "--model.n_layer", "4")
    assert "raise --train.max_iters" in refused(*run)
    longer = (*run, "--train.max_iters", "20")
    assert "it has the state of adamw (m, v), not of sgd (-)" in refused(*longer, "--optimizer.name", "sgd")
    assert "its numbers are float64" in refused(*longer, "--precision.dtype", "float32")
    assert "train.seed = 1337, not of 1" in refused(*longer, "--train.seed", "1")
    assert "a checkpoint has its own weights" in refused(
        *longer, "--init_from", str(next(given.glob("*.safetensors")))
    )
    peer = [word.replace("torch-manual", "nanogpt-loop") for word in longer]
    assert "a peer has none" in refused(*peer)
    peer += ["--model.dropout", "0"]
    assert "nanogpt-loop cannot begin with a checkpoint" in refused(*peer, "--checkpoint.every", "0")
    assert "nanogpt-loop: checkpoint.every" in refused(*peer)
    file = next(given.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert f"{file}: its contents have changed" in refused(*longer)
    fields = json.loads((given / "checkpoint.json").read_text())
    (given / "checkpoint.json").write_text(json.dumps(fields | {"format": 99}))
    assert "format = 99, and this version reads 2" in refused(*longer)
