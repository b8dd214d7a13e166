"""Moments in the host's memory: less on the devices. test_evaluation.py compares the numbers."""

from compare.cli import main
from compare.contract.record import ON_HOST, read_record

ROW = "fsdp_tp, moments on the host"
ONE_OF_EACH = ("torch-manual", "jax-compiler")


def test_moments_leave_the_devices(grid, shardpair):
    run, records = grid.run(ROW), grid.records(ROW)
    for engine, record in records.items():
        manifest = record.manifest
        assert set(manifest.resident_bytes["optimizer"]) == {0}, engine
        assert min(manifest.resident_bytes[ON_HOST]) > 0, engine
    kept, moved = (grid.records(row)["torch-manual"].manifest for row in ("fsdp_tp", ROW))
    assert moved.resident_bytes[ON_HOST] == kept.resident_bytes["optimizer"]
    assert kept.peak_memory_bytes[0] > moved.peak_memory_bytes[0]

    more = ("--train.max_iters", "5", "--run_dir", "gone-on", "--no_ladder")
    done = shardpair("resume", str(run), "--engines", *ONE_OF_EACH, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    for engine in ONE_OF_EACH:
        record = read_record(shardpair.folder / "gone-on" / engine)
        assert [step.step for step in record.steps] == [3, 4]
        assert set(record.manifest.resident_bytes["optimizer"]) == {0}


def test_offload_is_rejected_with_a_reason(capsys):
    assert main(["run", "demo", "--engines", "torch-library", "--layout.offload", "optimizer"]) == 2
    assert "layout.offload = optimizer: PyTorch moves moments to the host only" in capsys.readouterr().err
