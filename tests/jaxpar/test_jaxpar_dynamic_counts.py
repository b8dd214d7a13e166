"""The calls of the ledger equal the calls that the profiler counts on each device.

The ledger is read from the text of a program, and the profile from its run. The text is equal on all devices.
The ledger computes the calls of each pipeline rank from loops and branches.
"""

from collections import Counter, defaultdict
from functools import cache

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from compare.contract.record import clear_record, read_record
from compare.contract.request import Request
from compare.contract.timeline import COMPUTE, TRACES, busy_us, exposed_us, idle_us
from compare.numerics.data import open_corpus
from compare.numerics.stream import arrays_of_step
from compare.side.recording import Progress
from compare.spec.axes import PP
from compare.spec.experiment import Data, Experiment, Layout, Model, Train
from jaxpar.measure.hlo_collectives import collectives
from jaxpar.measure.ledger import key_of
from jaxpar.measure.profile import Execution, make_timeline, recorded
from jaxpar.programs import compile_program, device_scalars, trace_train
from jaxpar.train import train
from tests.support.jax_steps import engine_and_state

EXPERIMENT = Experiment(
    model=Model(n_layer=4, n_head=4, n_embd=16, block_size=8, vocab_size=65, bias=True),
    data=Data(source="synthetic"),
    train=Train(max_iters=2, batch_size=8, gradient_accumulation_steps=2),
)
LAYOUTS = {
    "ddp": Layout(dp_replicate=4),
    "fsdp_tp_sp": Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True),
    "fsdp_pp": Layout(pp=2, dp_shard=2, zero=3, schedule="gpipe", microbatches=2),
    "interleaved": Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2),
    "tp_pp": Layout(pp=2, tp=2, schedule="1f1b", microbatches=2),
}
CASES = [("jax-compiler", "fsdp_pp")]
CASES += [("jax-manual", name) for name in ("ddp", "fsdp_tp_sp", "interleaved", "tp_pp")]


@cache
def ran(engine_name: str, name: str) -> tuple[list[Execution], str]:
    """The profile of the second of two steps, and the HLO that ran."""
    experiment = replace(EXPERIMENT, layout=LAYOUTS[name])
    corpus, (engine, state) = open_corpus(experiment), engine_and_state(engine_name, experiment)
    compiled = compile_program(engine, trace_train(engine, state))
    hlo = compiled.as_text()
    assert hlo

    def step(number: int) -> None:
        batch = jax.device_put(arrays_of_step(corpus, experiment, number), engine.shardings.batch)
        scalars = device_scalars(experiment, Progress(step=number, updates=number))
        outputs = compiled(state.params, state.opt_state, batch, scalars)
        state.params, state.opt_state, _ = jax.block_until_ready(outputs)

    step(0)
    with recorded(hlo, list(engine.mesh.devices.flat)) as found:
        step(1)
    return found, hlo


def counted(engine: str, name: str) -> dict[tuple[str, str, str], list[int]]:
    """Calls of each kind, axis and purpose on each device; all instructions must agree with the ledger."""
    (events, hlo), axes = ran(engine, name), LAYOUTS[name].axes
    seen = Counter((event.name, event.device) for event in events)
    ranks = np.indices(tuple(axes.values()))[list(axes).index(PP)].ravel()
    said: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(len(ranks), int))
    for collective in collectives(hlo, axes):  # a computation that is called twice gives two of one name
        if key := key_of(collective, axes):
            said[key, collective.name] += [collective.calls_at(rank) for rank in ranks]
    totals: dict[tuple[str, str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(ranks), int))
    for (key, instruction), calls in said.items():
        found = [seen[instruction, device] for device in range(len(ranks))]
        assert found == calls.tolist(), instruction
        totals[key] += calls
    return {key: calls.tolist() for key, calls in totals.items()}


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_profile_counts_calls_of_the_ledger(engine, name):
    runs = counted(engine, name)
    assert runs
    timeline = make_timeline(*ran(engine, name), LAYOUTS[name].axes, step=1)
    for lane in timeline.lanes:
        assert {span.kind for span in lane.spans} == {*COMPUTE, "communication"}
        assert [span.begin_us for span in lane.spans] == sorted(span.begin_us for span in lane.spans)
        assert max(span.end_us for span in lane.spans) <= timeline.wall_us + 1e-3
        spans = Counter((span.operation, span.axis, span.purpose) for span in lane.spans)
        assert {key: spans[key] for key in runs} == {key: calls[lane.device] for key, calls in runs.items()}
        assert 0 < exposed_us(lane) <= busy_us(lane, "communication") + 1e-3
        assert busy_us(lane, "communication") + idle_us(lane, timeline.wall_us) < timeline.wall_us


def test_loss_is_counted_on_the_last_stage():
    """Devices 2 and 3, the last stage, compute the loss and reduce it over tp."""
    (of_loss,) = [calls for (_, *of), calls in counted("jax-manual", "tp_pp").items() if of == ["tp", "loss"]]
    assert of_loss[:2] == [0, 0]
    assert of_loss[2] == of_loss[3] > 0


def test_short_run_profiles_its_last_step(tmp_path):
    experiment = replace(EXPERIMENT, train=Train(max_iters=2, batch_size=2), layout=Layout(dp_replicate=2))
    train(Request(engine="jax-manual", experiment=experiment, profile=True), tmp_path)
    record = read_record(tmp_path, requested=False)
    assert record.timeline is not None
    assert record.timeline.step == 1
    assert [lane.device for lane in record.timeline.lanes] == [0, 1]
    assert [step.instrumented for step in record.steps] == [False, True]
    assert record.timeline.wall_us <= 1e3 * record.steps[1].step_time_ms
    assert (tmp_path / "timeline.json").is_file()
    assert not any(path.is_dir() for path in tmp_path.iterdir())  # the profiler's own folder is gone
    assert set(TRACES) <= {path.name for path in tmp_path.iterdir()}
    clear_record(tmp_path)
    assert not list(tmp_path.iterdir())
