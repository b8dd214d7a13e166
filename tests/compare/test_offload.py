"""Moments in the host's memory: less on the devices. `test_matrix` holds the numbers to one device."""

from compare.contract.record import ON_HOST, read_record
from compare.theory.memory import bytes_held, excess
from tests.support.bounds import AT_REST, assert_bounded
from tests.support.grid import ON_HOST as FLAGS
from tests.support.grid import SETTINGS, TODAY, arguments_of

ROW = "fsdp_tp, moments on the host"
ONE_OF_EACH = ("torch-manual", "jax-compiler")


def test_moments_leave_the_devices_and_a_training_goes_on_with_them(grid, shardpair):
    run, records = grid.run(ROW), grid.records(ROW)
    for engine, record in records.items():
        manifest = record.manifest
        assert set(manifest.resident_bytes["optimizer"]) == {0}
        assert min(manifest.resident_bytes[ON_HOST]) > 0
        assert_bounded(record)
        assert abs(excess(manifest.resident_bytes, bytes_held(engine, manifest.experiment))) < AT_REST
    without = [word for word in arguments_of(ROW) if word not in FLAGS]
    kept_none = [word for word in SETTINGS if word != "--keep_tensors"]
    without[without.index("--engines") :] = ["--engines", "torch-manual", *TODAY, *kept_none]
    done = shardpair(*without, "--no_ladder", "--run_dir", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = read_record(shardpair.folder / "none" / "torch-manual").manifest
    moved = records["torch-manual"].manifest
    assert moved.resident_bytes[ON_HOST] == kept.resident_bytes["optimizer"]
    assert kept.peak_memory_bytes[0] > moved.peak_memory_bytes[0]

    more = ("--train.max_iters", "5", "--run_dir", "gone-on", "--no_ladder")
    done = shardpair("resume", str(run), "--engines", *ONE_OF_EACH, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    for engine in ONE_OF_EACH:
        record = read_record(shardpair.folder / "gone-on" / engine)
        assert [step.step for step in record.steps] == [3, 4]
        assert set(record.manifest.resident_bytes["optimizer"]) == {0}


def test_an_engine_that_cannot_says_what_it_has_instead(shardpair):
    done = shardpair("run", "demo", "--engines", "torch-library", "--layout.offload", "optimizer")
    assert done.returncode == 2
    assert "layout.offload = optimizer: PyTorch moves moments to the host only together with" in done.stderr
