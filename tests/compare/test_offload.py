"""Moments in the host's memory: the same numbers, and less on the devices."""

import numpy as np
import pytest
from bounds import assert_bounded

from compare.contract.record import ON_HOST, Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.judge.closed_forms.memory import TOLERANCE, closed_form, excess
from compare.spec.experiment import to_toml

ENGINES = ("torch-manual", "jax-compiler", "jax-explicit", "jax-manual")
GPIPE = ("--layout.pp", "2", "--layout.schedule", "gpipe", "--layout.microbatches", "2")
LAYOUTS = {
    "fsdp_tp": ("--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2"),
    "zero1_pp": ("--layout.dp_shard", "2", "--layout.zero", "1", *GPIPE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_on_the_host_change_no_number_and_leave_the_devices(tiny, shardpair, layout):
    (shardpair.folder / "tiny.toml").write_text(to_toml(tiny))

    def trained(offload: str) -> dict[str, Record]:
        name = f"{layout}-{offload}"
        arguments = (*LAYOUTS[layout], "--layout.offload", offload, "--run_dir", name, "--keep_tensors")
        done = shardpair("run", "tiny.toml", "--engines", *ENGINES, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return {engine: read_record(shardpair.folder / name / engine) for engine in ENGINES}

    before, after = trained("none"), trained("optimizer")
    for engine in ENGINES:
        kept, moved = before[engine].manifest, after[engine].manifest
        assert set(moved.resident_bytes["optimizer"]) == {0}
        assert_bounded(before[engine])
        assert_bounded(after[engine])
        assert moved.resident_bytes[ON_HOST] == kept.resident_bytes["optimizer"]
        assert abs(excess(moved.resident_bytes, closed_form(engine, moved.experiment))) < TOLERANCE
        for rung in (Rung.FIRST_M, Rung.FIRST_V, Rung.LATER_WEIGHTS):
            found, expected = (read_tensors(one[engine].folder, rung) for one in (after, before))
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-15)
    peaks = [runs["torch-manual"].manifest.peak_memory_bytes[0] for runs in (before, after)]
    assert peaks[0] > peaks[1]


def test_an_engine_that_cannot_says_what_it_has_instead(shardpair):
    done = shardpair("run", "demo", "--engines", "torch-library", "--layout.offload", "optimizer")
    assert done.returncode == 2
    assert "layout.offload = optimizer: PyTorch moves moments to the host only along with" in done.stderr


def test_a_training_goes_on_with_its_moments_on_the_host(tiny, shardpair):
    (shardpair.folder / "tiny.toml").write_text(to_toml(tiny))
    arguments = ("--layout.dp_shard", "2", "--layout.zero", "1", "--layout.offload", "optimizer")
    begun = ("run", "tiny.toml", "--engines", *ENGINES, *arguments, "--run_dir", "begun")
    done = shardpair(*begun, "--train.max_iters", "2", "--checkpoint.every", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    more = ("resume", "begun", "--engines", *ENGINES, "--train.max_iters", "4", "--run_dir", "gone-on")
    done = shardpair(*more)
    assert done.returncode == 0, done.stdout + done.stderr
    for engine in ENGINES:
        assert set(
            read_record(shardpair.folder / "gone-on" / engine).manifest.resident_bytes["optimizer"]
        ) == {0}
