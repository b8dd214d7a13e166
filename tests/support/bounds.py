"""What a device held, against what `--dry_run` says that it holds at most."""

from collections.abc import Mapping

from compare.contract.record import Record
from compare.spec.experiment import Experiment
from compare.studies.memory_estimate import estimate_memory

AT_MOST = ("activations", "logits")


def above_the_bound(
    engine: str, experiment: Experiment, *, device: int, held: Mapping[str, int], peak: int
) -> dict[str, float]:
    """What is above its bound, as a multiple of it: {} as it should be.

    Args:
        engine: a name in ENGINES.
        experiment: what it trained.
        device: in the order of the mesh.
        held: at the device's peak, by class; {} if only the peak is known.
        peak: bytes of the whole device, by the engine's own count or by XLA's plan.
    """
    estimate = estimate_memory(engine, experiment)
    found = {kind: (held.get(kind, 0), estimate.by_kind[kind][device]) for kind in AT_MOST}
    found["all"] = max(peak, sum(held.values())), estimate.per_device[device]
    return {kind: got / max(most, 1) for kind, (got, most) in found.items() if got > most}


def assert_bounded(record: Record) -> None:
    """A record's devices held no more than is said before it runs."""
    manifest, memory = record.manifest, record.memory
    assert manifest.peak_memory_bytes
    for device, peak in enumerate(manifest.peak_memory_bytes):
        options = {"device": device, "peak": peak, "held": memory.of(device).peak.bytes if memory else {}}
        assert above_the_bound(manifest.engine, manifest.experiment, **options) == {}, manifest.engine
