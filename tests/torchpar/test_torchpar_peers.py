"""nanogpt-loop in this process: timed windows, threads, and divergence."""

import pytest
import torch
from msgspec.structs import replace

from compare.contract.timing import Timing
from compare.side.ending import DivergedError
from compare.spec.experiment import Data, Experiment, Optimizer, Train
from tests.support.torch_runs import trained

TIMING = Timing(warmup=2, window=2, windows=2, single=1)


@pytest.fixture(autouse=True)
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short(tiny: Experiment) -> Experiment:
    return replace(tiny, data=Data(source="synthetic"), train=Train(max_iters=TIMING.steps, batch_size=4))


def test_nanogpt_loop_timed_windows(tmp_path, short):
    record = trained(tmp_path, short, "nanogpt-loop", timing=TIMING)
    assert [window.steps for window in record.manifest.windows] == [2, 2]
    assert all(window.wall_s > 0 and window.cpu_s > 0 for window in record.manifest.windows)
    assert [step.step for step in record.steps] == list(range(TIMING.steps))
    assert record.steps[-1].loss < record.steps[0].loss
    assert record.manifest.threads == "2 per rank"
    assert record.request.timing == TIMING


def test_nanogpt_loop_divergence(tmp_path, short):
    wild = replace(short, optimizer=Optimizer(learning_rate=1e300, decay_lr=False, grad_clip=0.0))
    with pytest.raises(DivergedError, match=r"the first weight that is not finite: \w+"):
        trained(tmp_path, wild, "nanogpt-loop")
