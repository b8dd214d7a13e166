"""Peak memory of a device, compared with the estimate of `--dry_run`."""

from compare.contract.record import Record
from compare.spec.experiment import Experiment
from compare.theory.peak import LEAST, peak_per_device


def above_the_estimate(engine: str, experiment: Experiment, *, device: int, peak: int) -> float:
    """How far a peak is above what the estimate allows, in bytes; 0 as it should be."""
    estimate = peak_per_device(engine, experiment)[device]
    return max(0.0, peak - estimate / LEAST)


def assert_bounded(record: Record) -> None:
    """Assert that no device of a record used more memory than estimated."""
    manifest = record.manifest
    assert manifest.peak_memory_bytes
    for device, peak in enumerate(manifest.peak_memory_bytes):
        assert not above_the_estimate(manifest.engine, manifest.experiment, device=device, peak=peak)
