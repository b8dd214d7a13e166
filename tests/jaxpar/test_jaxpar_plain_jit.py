"""plain-jit's own parts: its schedule is nanoGPT's, and a timed run has its windows."""

import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from compare.contract.record import read_record
from compare.contract.request import REQUEST, Request
from compare.contract.timing import Timing
from compare.numerics.optimizer import learning_rate
from compare.spec.experiment import Data, Experiment, Optimizer, Train
from compare.system.json_files import write_json
from jaxpar.peers.plain_jit import learning_rate_of
from jaxpar.train import train


@pytest.mark.parametrize(("warmup", "decay"), [(3, 10), (0, 10), (5, 5), (5, 2), (5, None)])
def test_schedule_equals_the_contract(warmup, decay):
    config = Optimizer(warmup_iters=warmup, lr_decay_iters=decay or 1, decay_lr=decay is not None)
    for step in range(14):
        rate = learning_rate_of(config)(jnp.int32(step))
        assert float(rate) == pytest.approx(learning_rate(config, step), rel=1e-14), step


def test_timed_run_has_windows(tmp_path, tiny: Experiment):
    timing = Timing(warmup=2, window=2, windows=2, single=1)
    experiment = replace(
        tiny, data=Data(source="synthetic"), train=Train(max_iters=timing.steps, batch_size=4)
    )
    request = Request(engine="plain-jit", experiment=experiment, timing=timing)
    write_json(tmp_path / REQUEST, request)
    train(request, tmp_path)
    record = read_record(tmp_path)
    assert [window.steps for window in record.manifest.windows] == [2, 2]
    assert all(window.wall_s > 0 for window in record.manifest.windows)
    assert [step.step for step in record.steps] == list(range(timing.steps))
    assert record.steps[-1].loss < record.steps[0].loss
