"""`python -m numpypar RUN_DIR`: data parallelism as a loop over devices, and the record that it leaves."""

import argparse
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from compare.contract.communication import Communication, ring_wire_bytes
from compare.contract.inputs import open_stream, starting_parameters
from compare.contract.ledger import Ledger
from compare.contract.record import Manifest, Recorder, Step
from compare.contract.request import REQUEST, Request, Rung
from compare.host.json_files import read_json
from compare.numerics.learning_rate import learning_rate
from compare.numerics.optimizer import global_norm, reference_step
from compare.numerics.parameters import fingerprint, parameter_count, parameter_table
from numpypar.model import loss_and_gradients

AXIS = "dp_replicate"


def main() -> None:
    """Train what RUN_DIR/request.json asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exit-with-stdin", action="store_true")
    folder = parser.parse_args().folder
    train(read_json(folder / REQUEST, Request), Recorder(folder))


def train(request: Request, recorder: Recorder) -> None:
    """The loop: each device's mean gradient over its share of the batch, then their mean, then a step."""
    started, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    experiment, corpus = request.experiment, open_stream(request)
    devices, layers = experiment.layout.dp_replicate, experiment.model.n_layer
    weights = initial = dict(starting_parameters(request))
    moments: dict = {}
    recorder.tensors(Rung.INITIAL_WEIGHTS, weights)
    for step in range(experiment.train.max_iters):
        step_begun = time.perf_counter()
        inputs_ABT, targets_ABT = corpus.batch(experiment, step)
        shares = zip(np.split(inputs_ABT, devices, 1), np.split(targets_ABT, devices, 1), strict=True)
        passes = [
            loss_and_gradients(weights, ids_BT, targets_BT, layers=layers)
            for inputs, targets in shares
            for ids_BT, targets_BT in zip(inputs, targets, strict=True)
        ]
        gradients = {
            name: sum(g[name] for _, g in passes) / len(passes) for name in weights
        }  # the all-reduce
        loss = float(np.mean([loss for loss, _ in passes]))
        weights, moments = reference_step(
            experiment.optimizer, parameter_table(experiment.model), weights, gradients, moments, step
        )
        recorder.step(
            Step(
                step=step,
                loss=loss,
                grad_norm=global_norm(gradients),
                lr=learning_rate(experiment.optimizer, step),
                step_time_ms=1e3 * (time.perf_counter() - step_begun),
            )
        )
        if step == 0:
            recorder.tensors(Rung.BATCH, {"inputs": inputs_ABT, "targets": targets_ABT})
            recorder.tensors(Rung.GRADIENTS, gradients)
            recorder.tensors(Rung.FIRST_M, moments["m"])
            recorder.tensors(Rung.FIRST_V, moments["v"])
        if rung := request.weights_due_after(step):
            recorder.tensors(rung, weights)
    size = sum(gradient.nbytes for gradient in gradients.values())
    sent = Communication(
        kind="all_reduce",
        axis=AXIS,
        purpose="gradients",
        calls=1,
        bytes=size,
        wire_bytes=ring_wire_bytes("all_reduce", size, devices),
    )
    manifest = Manifest(
        engine=request.engine,
        experiment=experiment,
        platform=request.platform,
        devices=devices,
        device_kind="a turn of a loop",
        parameters=parameter_count(experiment.model),
        initial_weights_sha256=fingerprint(initial),
        corpus_sha256=corpus.sha256,
        versions={"numpy": np.__version__},
        threads="NumPy's own",
        started_utc=started,
        compile_s=0.0,
        first_step_s=time.perf_counter() - begun,
        cpu_time_s=time.process_time(),
        peak_memory_bytes=[5 * size] * devices,
        peak_memory_method="five times the weights, as a loop would have it",
        resident_bytes={
            "parameters": [size] * devices,
            "gradients": [size] * devices,
            "optimizer": [2 * size] * devices,
        },
    )
    recorder.ledger(Ledger(rows=[sent] if devices > 1 else []))
    recorder.finish(manifest)


if __name__ == "__main__":
    main()
