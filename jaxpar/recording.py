"""The record of a run: an observer that the training loop calls."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from compare.contract.divergence import end_if_diverged, first_not_finite
from compare.contract.ledger import Ledger
from compare.contract.progress import Place
from compare.contract.record import ON_HOST, Manifest, Recorder
from compare.contract.request import Request, Rung
from compare.contract.timing import Window
from compare.host.facts import cpu_seconds, versions
from compare.numerics.data import Corpus
from compare.numerics.parameters import fingerprint, parameter_count
from compare.numerics.stream import OwnBatches
from compare.pipeline.ticks import Ticks
from compare.spec.experiment import Experiment
from jaxpar import weights
from jaxpar.comm.mesh import device_kind
from jaxpar.measure.ledger import communications
from jaxpar.measure.listing import listing
from jaxpar.measure.profile import watched_step
from jaxpar.measure.usage import (
    PACKAGES,
    first_device,
    memory_in_use,
    memory_profile,
    peak_memory,
    resident_bytes,
    threads,
)
from jaxpar.measure.work import work_of
from jaxpar.optimizer import moments
from jaxpar.state import TrainState
from jaxpar.training_step import ShardedStep

_MOMENT_RUNGS = {"m": Rung.FIRST_M, "v": Rung.FIRST_V}


class Recording:
    """The record of a run, as far as it is known.

    Args:
        request: what is run.
        recorder: writes.
        sharded: between the trees on the devices and the model's own shapes.
        state: before the first step.
        corpus: where the batches come from.
        started_utc: when the run began.
        moments: finds m and v in the optimizer's state.
    """

    def __init__(
        self,
        request: Request,
        recorder: Recorder,
        *,
        sharded: ShardedStep,
        state: TrainState,
        corpus: Corpus | OwnBatches,
        started_utc: str,
        moments: Callable[[Any], dict[str, Any]] = moments,
    ):
        self._request, self._recorder, self._sharded, self._state = request, recorder, sharded, state
        self._corpus, self._started_utc = corpus, started_utc
        self._moments = moments
        self._first_step_s = 0.0
        self._windows: list[Window] = []
        initial_weights = canonical_weights(sharded, state, self._experiment)
        self._initial_weights_sha256 = fingerprint(initial_weights)
        if request.ladder:
            recorder.tensors(Rung.INITIAL_WEIGHTS, initial_weights)

    @property
    def engine(self) -> str:
        """Whose run it is."""
        return self._request.engine

    def steps_are_done(
        self, batch: Any, done: list[tuple[Place, Any]], gradients: Any, window: Window
    ) -> None:
        """After a step, or after several in a window, when the state has moved on.

        Leaves their numbers, and the tensors that the ladder asks for.

        Args:
            batch: of the last step, as it was placed.
            done: of each step where it began, and its loss and grad_norm, scalars.
            gradients: of the first step with a ladder, before clipping; else None.
            window: the steps, and what they cost.

        Raises:
            DivergedError: the loss or the gradient norm is not finite; the record ends with that step.
        """
        request, step = self._request, done[0][0].step
        if request.timing and request.timing.is_in_window(step):
            self._windows.append(window)
        for place, metrics in done:
            self._note(place, metrics, window)
        if request.ladder and step == request.first_step:
            self._recorder.tensors(Rung.BATCH, jax.device_get(batch))
            self._leave(Rung.GRADIENTS, gradients)
            for name, tree in self._moments(self._state.opt_state).items():
                self._leave(_MOMENT_RUNGS[name], tree)
        if rung := request.weights_due_after(step):
            self._leave(rung, self._state.params)

    def is_traced(self, program: Any, *, ticks: Sequence[Ticks] = ()) -> None:
        """The step has been traced: leave what it computes. Arguments as of `work_of`."""
        self._recorder.work(work_of(program, ticks))

    def finish(self, step: jax.stages.Compiled, devices: list[jax.Device], *, compile_s: float) -> None:
        """After the last step: what it cost, read from the compiled step, completes the record."""
        request, experiment = self._request, self._experiment
        hlo = step.as_text()
        assert hlo, "XLA keeps no text of the compiled step"
        peak_memory_bytes, peak_memory_method = peak_memory(step, devices)
        manifest = Manifest(
            engine=request.engine,
            experiment=experiment,
            platform=request.platform,
            devices=len(devices),
            device_kind=device_kind(devices[0]),
            parameters=parameter_count(experiment.model),
            initial_weights_sha256=self._initial_weights_sha256,
            corpus_sha256=self._corpus.sha256,
            versions=versions(PACKAGES),
            threads=threads(devices),
            started_utc=self._started_utc,
            compile_s=compile_s,
            first_step_s=self._first_step_s,
            cpu_time_s=cpu_seconds(),
            peak_memory_bytes=peak_memory_bytes,
            peak_memory_method=peak_memory_method,
            resident_bytes=self._at_rest(devices),
            windows=self._windows,
        )
        state = {kind: manifest.resident_bytes[kind][0] for kind in ("parameters", "optimizer")}
        if profile := memory_profile(step, **state):
            self._recorder.memory(profile)
        self._recorder.instructions(listing(hlo, experiment.layout.axes))
        problems: list[str] = []
        rows = communications(hlo, experiment.layout.axes, problems=problems)
        self._recorder.finish(manifest, Ledger(rows=rows, problems=problems))

    def _at_rest(self, devices: list[jax.Device]) -> dict[str, list[int]]:
        trees = {
            "parameters": self._state.params,
            "gradients": gradients_at_rest(self._sharded, self._state),
            "optimizer": self._state.opt_state,
        }
        held = {kind: resident_bytes(tree, devices) for kind, tree in trees.items()}
        if self._sharded.moments_at_rest is not None:
            held[ON_HOST] = resident_bytes(self._state.opt_state, devices, on_host=True)
        return held

    def _note(self, place: Place, metrics: Any, window: Window) -> None:
        seconds = window.wall_s / window.steps
        if place.step == self._request.first_step:
            self._first_step_s = seconds
        loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
        memory = memory_in_use(first_device(self._state.params))
        done = place.record(
            self._experiment,
            loss=loss,
            grad_norm=grad_norm,
            seconds=seconds,
            memory=memory,
            instrumented=place.step == watched_step(self._request),
        )
        self._recorder.step(done)
        end_if_diverged(self._request.engine, done, where=self._first_weight_not_finite)

    @property
    def _experiment(self) -> Experiment:
        return self._request.experiment

    def _leave(self, rung: Rung, tree: Any) -> None:
        self._recorder.tensors(rung, weights.to_canonical(self._sharded.unpad(tree), self._experiment.model))

    def _first_weight_not_finite(self) -> str:
        """A clause that names it: gradients never leave the step, so it is what they made of the weights."""
        first = first_not_finite(canonical_weights(self._sharded, self._state, self._experiment))
        if first:
            return f"the first weight that is not finite after the step is {first}"
        return "every weight is finite after the step"


def canonical_weights(
    sharded: ShardedStep, state: TrainState, experiment: Experiment
) -> dict[str, np.ndarray]:
    """The weights by canonical name, read back from the devices."""
    return weights.to_canonical(sharded.unpad(state.params), experiment.model)


def gradients_at_rest(sharded: ShardedStep, state: TrainState) -> Any:
    """The accumulated gradients' shapes and shardings: they live inside a step and never leave it.

    As the step is to keep them; that XLA does so is for tests to read from the loops of the compiled step.
    """
    return jax.tree.map(
        lambda w, sharding: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding),
        state.params,
        sharded.accumulated,
    )
