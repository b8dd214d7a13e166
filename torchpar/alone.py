"""One rank of many, alone in a process: what it would send, without the others.

    python -m torchpar --alone REQUEST

prints a `RankAlone` as one line of JSON. PyTorch's fake process group says at once that every collective is
done, and moves nothing: numbers mean nothing, and what is sent, how often and over which group, is as on a
cluster.
"""

import functools

import torch

from compare.contract.rank_alone import RankAlone, RankAloneRequest
from compare.contract.request import Request
from compare.numerics.stream import arrays_of_step
from compare.spec.experiment import edited
from torchpar.comm.mesh import make_mesh
from torchpar.comm.process_groups import join_absent
from torchpar.comm.rank import Heartbeat, Rank
from torchpar.measure.ledger import LedgerMode
from torchpar.measure.places import group_names
from torchpar.on_device import to_device
from torchpar.setup import set_up
from torchpar.state import Run
from torchpar.train import compute_gradients, move_on, update_weights

STEPS = 3
"""The last of them is watched: wrappers learn of the others in the first two."""


def run_alone(request: RankAloneRequest) -> RankAlone:
    """Train as one rank among others that are not there, and say what the last step sent.

    Args:
        request: the engine, the experiment and the rank.
    """
    experiment = edited(request.experiment, {"train": {"max_iters": STEPS, "eval_interval": 0}})
    ranks = experiment.layout.devices
    join_absent(rank=request.rank, world_size=ranks)
    torch.set_num_threads(1)
    heartbeat = Heartbeat([0] * Heartbeat.cells_for(ranks))
    rank = Rank(rank=request.rank, world_size=ranks, local_rank=0, heartbeat=heartbeat)
    mesh = make_mesh(experiment.layout, rank=request.rank, device=torch.device("cpu"))
    run = set_up(Request(engine=request.engine, experiment=experiment), mesh, rank)
    noted = [_watched(run, step) for step in range(STEPS)][-1].noted()
    return RankAlone(rows=list(noted.rows), problems=list(noted.problems))


def _watched(run: Run, step: int) -> LedgerMode:
    """One step, and its ledger."""
    ledger = LedgerMode(group_names(run.mesh), own_calls=run.mesh.traffic, infers=True)
    arrays = functools.partial(arrays_of_step, run.corpus, run.experiment)
    with ledger:
        compute_gradients(run, to_device(run, arrays(step)))
        ledger.is_updating = True
        update_weights(run)
    move_on(run, torch.zeros(()))
    return ledger
