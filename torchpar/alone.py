"""One rank of many, alone in a process: what it would send and keep, without the others.

    python -m torchpar --alone REQUEST

prints a `RankAlone` as one line of JSON. PyTorch's fake process group says at once that every collective is
done, and moves nothing; large operators compute nothing (`torchpar.measure.hollow`). Numbers mean nothing;
what is sent, how often and over which group, and what is in memory when, is as on a cluster.
"""

from contextlib import nullcontext

import numpy as np
import torch

from compare.contract.absent import AbsentRequest, RankAlone
from compare.contract.ledger import Ledger
from compare.contract.request import Request
from compare.numerics.boxes import Given
from compare.numerics.parameters import parameter_table, storage_dtype
from compare.numerics.stream import arrays_of_step
from compare.spec.experiment import ExperimentError, edited
from torchpar.comm.mesh import make_mesh
from torchpar.comm.process_groups import join_absent
from torchpar.launch import Rank
from torchpar.measure.hollow import HollowMode
from torchpar.observers import INSTRUMENTED_STEP, Instruments
from torchpar.run import to_device
from torchpar.train import move_on, set_up


def run_alone(request: AbsentRequest) -> RankAlone:
    """Train as the first rank among others that are not there; of one step say what it sends and keeps."""
    steps = INSTRUMENTED_STEP + 1
    experiment = edited(request.experiment, {"train": {"max_iters": steps, "eval_interval": 0}})
    ranks = experiment.layout.devices
    if ranks == 1:
        raise ExperimentError("--alone: one device has no others")
    join_absent(world_size=ranks)
    torch.set_num_threads(1)
    rank = Rank(rank=0, world_size=ranks, local_rank=0)
    mesh = make_mesh(experiment.layout, rank=0, device=torch.device("cpu"))
    asked = Request(engine=request.engine, experiment=experiment)
    zero = np.zeros((), storage_dtype(experiment))  # first weights that take no memory
    rows = parameter_table(experiment.model)
    weights = Given({row.name: np.broadcast_to(zero, row.shape) for row in rows})
    with HollowMode():
        run = set_up(asked, mesh, rank, weights)
        instruments = Instruments(run)
        for step in range(steps):
            with instruments.watch() if step == instruments.watched else nullcontext():
                run.compute(run, to_device(run, arrays_of_step(run.corpus, experiment, step)))
                instruments.gradients(step)
                run.update(run)
            move_on(run, torch.zeros(()))
    memory, _, ledger = instruments.findings()
    return RankAlone(ledger=Ledger(rows=ledger.rows, problems=list(ledger.problems)), memory=memory)
