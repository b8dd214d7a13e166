"""`--continue` of a stopped case: from its newest checkpoint, with the record of an uninterrupted run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from compare.checkpoint.description import CHECKPOINTS, DESCRIPTION, checkpoints_in
from compare.contract.record import (
    MANIFEST,
    STEPS,
    STEPS_PART,
    Failure,
    Step,
    leave_failure,
    read_failure,
    read_lines,
    read_record,
    read_tensors,
)
from compare.contract.request import Rung
from compare.judge.outcome import read_outcome, save
from compare.numerics.stream import steps_due
from compare.run.continuing import make_room
from compare.spec.experiment import edited
from tests.support.checkpoints import STEP, write_random
from tests.support.records import CORPUS, make_record, make_request

ENGINES = ("torch-manual", "jax-manual")
STOP = 6
EXPERIMENT = (
    *("--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16"),
    *("--precision.dtype", "float64", "--preset", "fsdp", "--devices", "2", "--train.batch_size", "4"),
    *("--train.max_iters", "9", "--train.eval_interval", "4", "--checkpoint.every", "3"),
    *("--checkpoint.keep", "9", "--keep_tensors", "--engines", *ENGINES),
)


def stop(folder, *names: str) -> None:
    """Make a finished run a run whose cases were killed in the step after `STOP` steps."""
    for name in names:
        case = folder / name
        lines = (case / STEPS).read_bytes().splitlines(keepends=True)
        (case / STEPS_PART).write_bytes(b"".join(lines[: STOP + 1]) + lines[STOP + 1][:20])
        for path in (case / STEPS, case / MANIFEST, case / f"{Rung.FINAL_WEIGHTS}.safetensors"):
            path.unlink()
        leave_failure(case, Failure(message="killed"))
        for step, path in checkpoints_in(case / CHECKPOINTS).items():
            if step > STOP:
                shutil.rmtree(path)
    outcome = read_outcome(folder)
    rest = {key: value for key, value in outcome.kept.items() if key not in names}
    judged = {key: value for key, value in outcome.alone.items() if key not in names}
    save(replace(outcome, kept=rest, alone=judged, verdicts=[]), folder)


@pytest.mark.slow
def test_stopped_run_continues_and_passes(shardpair):
    folder = shardpair.folder / "r"
    done = shardpair("run", "demo", *EXPERIMENT, "--run_dir", str(folder))
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder, shardpair.folder / "whole")
    stop(folder, *ENGINES)
    done = shardpair("run", "--continue", str(folder))
    assert done.returncode == 0, done.stderr
    assert "PASS: torch-manual and jax-manual compute the same" in " ".join(done.stdout.split())
    assert "stopped, and continued at step" in done.stdout
    for name in ENGINES:
        assert f"{name} continues from its checkpoint of step {STOP}" in done.stderr
        whole, record = (read_record(shardpair.folder / of / name) for of in ("whole", "r"))
        assert record.manifest.initial_weights_sha256 == whole.manifest.initial_weights_sha256
        assert [one.step for one in record.evaluations] == steps_due(record.manifest.experiment)
        for field in ("loss", "grad_norm"):
            values = [[getattr(step, field) for step in one.steps] for one in (record, whole)]
            # In JAX a step that records gradients is another program: the last bit may differ.
            np.testing.assert_allclose(*values, rtol=1e-12, err_msg=field)
        assert record.ledger.rows == whole.ledger.rows
        for rung in Rung:
            kept, wanted = (read_tensors(one.folder, rung) for one in (record, whole))
            for tensor in [*wanted]:
                # Adam divides a gradient by its own size, so small gradients amplify that bit.
                np.testing.assert_allclose(kept[tensor], wanted[tensor], rtol=1e-9, atol=1e-12)
        request = record.request
        assert request
        assert request.continues
        assert (request.next_step, request.first_step) == (STOP, 0)


OWN = {"corpus_sha256": CORPUS, "initial_sha256": "11"}
DAMAGES = {
    "another engine's checkpoint": {"engine": "jax-manual"},
    "other tokens": {"corpus_sha256": "22"},
    "a checkpoint without the digest of the first weights": {"initial_sha256": ""},
}


@pytest.fixture
def stopped(tiny, tmp_path):
    """A function that writes a stopped case with a checkpoint, and returns its request and its folder."""

    def write(*, steps=9, **described):
        experiment = edited(tiny, {"train": {"max_iters": steps}})
        make_record(tmp_path / "case", experiment)
        write_random(tmp_path / "case", experiment, **OWN | described)
        (tmp_path / "case" / MANIFEST).unlink()
        (tmp_path / "case" / STEPS).rename(tmp_path / "case" / STEPS_PART)
        return make_request(experiment), tmp_path / "case"

    return write


@pytest.mark.parametrize("end", [b"", b'{"step": 9, "lo'])
def test_record_is_cut_after_the_checkpoint(stopped, end):
    """A kill may tear the last line."""
    request, folder = stopped()
    with (folder / STEPS_PART).open("ab") as file:
        file.write(end)
    leave_failure(folder, Failure(message="killed"))
    point = make_room(request, folder)
    assert point
    assert (point.step, Path(point.checkpoint).parent) == (STEP, folder / CHECKPOINTS)
    assert [line.step for line in read_lines(folder / STEPS_PART, Step)] == [*range(STEP)]
    assert read_failure(folder) is None


@pytest.mark.parametrize("described", DAMAGES.values(), ids=DAMAGES)
def test_foreign_checkpoint_is_set_aside(stopped, described):
    assert_begins_again(*stopped(**described))


@pytest.mark.parametrize("damage", ["steps", "a line", "tensors", "the end", "a profile"])
def test_damaged_case_begins_again(stopped, damage):
    request, folder = stopped(steps=STEP if damage == "the end" else 9)
    part = folder / STEPS_PART
    match damage:
        case "steps":
            part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[: STEP - 1]))
        case "a line":
            part.write_bytes(part.read_bytes().replace(b'"step":2', b'"step":"2'))
        case "tensors":
            (file,) = folder.glob(f"{CHECKPOINTS}/*/device-*")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "a profile":
            request = replace(request, profile=True)
    assert_begins_again(request, folder)


def assert_begins_again(request, folder) -> None:
    lines = (folder / STEPS_PART).read_bytes()
    assert not make_room(request, folder)
    assert not folder.exists()
    aside = folder.with_name("case.unfinished-1")
    assert (aside / STEPS_PART).read_bytes() == lines
    assert [*aside.glob(f"{CHECKPOINTS}/*/{DESCRIPTION}")]
