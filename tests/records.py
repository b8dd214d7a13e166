"""Records made by hand: what an engine would leave, without running one."""

from pathlib import Path

import numpy as np

from compare.contract.experiment import Experiment
from compare.contract.parameters import fingerprint, initial_parameters
from compare.contract.record import Communication, Manifest, Record, Recorder, Rung, Step, read_record


def tensors_of(experiment: Experiment) -> dict[Rung, dict[str, np.ndarray]]:
    """Plausible tensors for every rung, the same at every call."""
    weights = initial_parameters(experiment)
    random = np.random.default_rng(0)
    noise = {name: random.normal(size=tensor.shape) for name, tensor in weights.items()}
    return {
        Rung.BATCH: {"inputs": np.arange(8).reshape(1, 2, 4), "targets": np.arange(1, 9).reshape(1, 2, 4)},
        Rung.INITIAL_WEIGHTS: weights,
        Rung.GRADIENTS: noise,
        Rung.FIRST_WEIGHTS: {name: weights[name] + noise[name] for name in weights},
        Rung.FIRST_M: {name: 0.1 * noise[name] for name in weights},
        Rung.FIRST_V: {name: 0.1 * noise[name] ** 2 for name in weights},
        Rung.LATER_WEIGHTS: {name: weights[name] - noise[name] for name in weights},
    }


def make_steps(count: int = 5) -> list[Step]:
    """A falling loss."""
    return [
        Step(
            step=index,
            loss=5.5 / (1 + index),
            grad_norm=2.0 + index,
            lr=1e-3,
            step_time_ms=10.0 + index,
            instrumented=index == 1,
        )
        for index in range(count)
    ]


def make_record(
    folder: Path,
    experiment: Experiment,
    *,
    engine: str = "torch-manual",
    tensors: dict[Rung, dict[str, np.ndarray]] | None = None,
    steps: list[Step] | None = None,
) -> Record:
    """Write a complete record and read it back."""
    folder.mkdir(parents=True)
    recorder = Recorder(folder)
    for rung, values in (tensors if tensors is not None else tensors_of(experiment)).items():
        recorder.tensors(rung, values)
    for step in steps or make_steps():
        recorder.step(step)
    manifest = Manifest(
        engine=engine,
        experiment=experiment,
        platform="cpu",
        devices=experiment.layout.devices,
        device_kind="a CPU",
        gradient_sync="none",
        remat="none",
        parameters=1,
        initial_weights_sha256=fingerprint(initial_parameters(experiment)),
        corpus_sha256="00",
        versions={"python": "3"},
        threads="one",
        started_utc="2026-01-01T00:00:00+00:00",
        compile_s=0.0,
        first_step_s=0.1,
        cpu_time_s=1.0,
        peak_memory_bytes=[1000, 2000],
        peak_memory_method="by hand",
    )
    ledger = [
        Communication(kind="all_reduce", axis="dp_replicate", calls=2, bytes=4000, wire_bytes=6000),
        Communication(kind="all_reduce", axis="dp_replicate", calls=1, bytes=4, wire_bytes=6, purpose="loss"),
    ]
    recorder.finish(manifest, ledger)
    return read_record(folder)
