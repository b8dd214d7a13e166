"""Moments in the host's memory: the same numbers, and less on the devices."""

import numpy as np
import pytest
from bounds import assert_bounded

from compare.contract.record import ON_HOST, Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.judge.closed_forms.memory import TOLERANCE, closed_form, excess
from compare.spec.experiment import to_toml

ENGINES = ("torch-manual", "jax-compiler", "jax-explicit", "jax-manual")
ONE_OF_EACH = ENGINES[:2]
GPIPE = ("--layout.pp", "2", "--layout.schedule", "gpipe", "--layout.microbatches", "2")
LAYOUTS = {
    "fsdp_tp": ("--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2"),
    "zero1_pp": ("--layout.dp_shard", "2", "--layout.zero", "1", *GPIPE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_on_the_host_change_no_number_and_leave_the_devices(tiny, shardpair, layout):
    """They are those of a run with its moments on the devices; the ladder holds the engines to each other."""
    (shardpair.folder / "tiny.toml").write_text(to_toml(tiny))

    def trained(offload: str, engines: tuple[str, ...]) -> dict[str, Record]:
        arguments = (*LAYOUTS[layout], "--layout.offload", offload, "--run_dir", offload, "--keep_tensors")
        done = shardpair("run", "tiny.toml", "--engines", *engines, *arguments, "--checkpoint.every", "3")
        assert done.returncode == 0, done.stdout + done.stderr
        return {engine: read_record(shardpair.folder / offload / engine) for engine in engines}

    after = trained("optimizer", ENGINES)
    for engine, record in after.items():
        moved = record.manifest
        assert set(moved.resident_bytes["optimizer"]) == {0}
        assert min(moved.resident_bytes[ON_HOST]) > 0
        assert_bounded(record)
        assert abs(excess(moved.resident_bytes, closed_form(engine, moved.experiment))) < TOLERANCE
    # Those of one of each side are trained anew, and the ladder has held the others to torch-manual.
    for engine, kept in trained("none", ONE_OF_EACH if layout == "zero1_pp" else ENGINES[:1]).items():
        moved = after[engine]
        assert_bounded(kept)
        assert moved.manifest.resident_bytes[ON_HOST] == kept.manifest.resident_bytes["optimizer"]
        for rung in (Rung.FIRST_M, Rung.FIRST_V, Rung.LATER_WEIGHTS):
            found, expected = (read_tensors(one.folder, rung) for one in (moved, kept))
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-15)
        if engine == "torch-manual":
            assert kept.manifest.peak_memory_bytes[0] > moved.manifest.peak_memory_bytes[0]
    if layout == "fsdp_tp":
        _goes_on(shardpair)


def _goes_on(shardpair) -> None:
    """A training that stops goes on with its moments on the host."""
    more = ("--train.max_iters", "5", "--run_dir", "gone-on", "--no_ladder")
    done = shardpair("resume", "optimizer", "--engines", *ONE_OF_EACH, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    for engine in ONE_OF_EACH:
        record = read_record(shardpair.folder / "gone-on" / engine)
        assert [step.step for step in record.steps] == [3, 4]
        assert set(record.manifest.resident_bytes["optimizer"]) == {0}


def test_an_engine_that_cannot_says_what_it_has_instead(shardpair):
    done = shardpair("run", "demo", "--engines", "torch-library", "--layout.offload", "optimizer")
    assert done.returncode == 2
    assert "layout.offload = optimizer: PyTorch moves moments to the host only along with" in done.stderr
