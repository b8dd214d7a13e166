"""What a run cost, read from its compiled step, and the manifest."""

from typing import Any

import jax

from compare.contract.ledger import Ledger
from compare.contract.observers import Observer, Steps
from compare.contract.record import ON_HOST, Manifest, Recorder
from compare.host.facts import cpu_seconds, versions
from compare.numerics.parameters import parameter_count
from jaxpar.comm.mesh import device_kind
from jaxpar.measure.ledger import communications
from jaxpar.measure.listing import listing
from jaxpar.measure.memory_profile import memory_profile
from jaxpar.measure.usage import PACKAGES, peak_memory, planned_memory, resident_bytes, threads
from jaxpar.state import Run, TrainState
from jaxpar.training_step import ShardedStep


class Summary(Observer):
    """Writes memory.json, collectives.hlo.json, ledger.json and, last, manifest.json.

    Args:
        run: what is trained.
        recorder: writes.
        steps: have the times.
        started_utc: when the run began.
    """

    def __init__(self, run: Run, recorder: Recorder, steps: Steps, started_utc: str):
        self._run, self._recorder, self._steps, self._started_utc = run, recorder, steps, started_utc

    def finish(self) -> None:
        """Complete the record."""
        manifest = self._manifest()  # before anything else takes time and memory
        step, experiment = self._run.step, self._run.experiment
        axes, model = experiment.layout.axes, experiment.model
        hlo = step.as_text()
        assert hlo, "XLA keeps no text of the compiled step"
        sizes = {model.vocab_size, -(-model.vocab_size // experiment.layout.tp)}
        planned = planned_memory(step)
        if profile := memory_profile(step, planned=planned, vocab=sizes, width=model.n_embd):
            self._recorder.memory(profile)
        self._recorder.instructions(listing(hlo, axes))
        problems: list[str] = []
        rows = communications(hlo, axes, problems=problems)
        self._recorder.ledger(Ledger(rows=rows, problems=problems))
        self._recorder.finish(manifest)

    def _manifest(self) -> Manifest:
        run, request, experiment = self._run, self._run.request, self._run.experiment
        peak_memory_bytes, peak_memory_method = peak_memory(run.step, run.devices)
        return Manifest(
            engine=request.engine,
            experiment=experiment,
            platform=request.platform,
            devices=len(run.devices),
            device_kind=device_kind(run.devices[0]),
            parameters=parameter_count(experiment.model),
            initial_weights_sha256=run.initial_weights_sha256,
            corpus_sha256=run.corpus.sha256,
            versions=versions(PACKAGES),
            threads=threads(run.devices),
            started_utc=self._started_utc,
            compile_s=run.compile_s,
            first_step_s=self._steps.first_step_s,
            cpu_time_s=cpu_seconds(),
            peak_memory_bytes=peak_memory_bytes,
            peak_memory_method=peak_memory_method,
            resident_bytes=at_rest(run),
            windows=self._steps.windows,
        )


def at_rest(run: Run) -> dict[str, list[int]]:
    """Bytes between two steps on each device, by kind."""
    state = run.state
    trees = {
        "parameters": state.params,
        "gradients": gradients_at_rest(run.sharded, state),
        "optimizer": state.opt_state,
    }
    held = {kind: resident_bytes(tree, run.devices) for kind, tree in trees.items()}
    if run.sharded.moments_at_rest is not None:
        held[ON_HOST] = resident_bytes(state.opt_state, run.devices, on_host=True)
    return held


def gradients_at_rest(sharded: ShardedStep, state: TrainState) -> Any:
    """The accumulated gradients' shapes and shardings: they live inside a step and never leave it.

    As the step is to keep them; that XLA does so is for tests to read from the loops of the compiled step.
    """
    return jax.tree.map(
        lambda w, sharding: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding),
        state.params,
        sharded.accumulated,
    )
