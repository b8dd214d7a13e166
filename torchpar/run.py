"""One rank's run: what it trains with and where it stands, its rows of a batch, its clock."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from compare.contract.communication import LOSS, ROUTING
from compare.contract.request import Request
from compare.numerics.context import order_of_positions
from compare.numerics.data import Corpus
from compare.side.host_facts import agree, facts_here
from compare.side.recording import Progress
from compare.spec.axes import CP, DATA, ROWS
from compare.spec.experiment import Experiment
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import PACKAGES, Mesh
from torchpar.launch import Rank, gpu_of
from torchpar.mlp import Balance
from torchpar.parallel_model import ParallelModel

MIXED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class RankBatch(NamedTuple):
    """One rank's rows of a global batch, on its device. A accumulated passes, B rows, T positions."""

    inputs_ABT: torch.Tensor
    """int64."""
    targets_ABT: torch.Tensor
    keys_AB2: torch.Tensor | None = None
    """Keys of the sequences, for dropout: their words' bits as int32."""

    def passes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Arguments of the model in each pass: inputs, targets (B, T), keys (B, 2) or None."""
        for number, (inputs_BT, targets_BT) in enumerate(zip(*self[:2], strict=True)):
            yield inputs_BT, targets_BT, None if self.keys_AB2 is None else self.keys_AB2[number]


@dataclass
class Run:
    """Everything that one rank trains with; weights and moments live in the model and its optimizer."""

    request: Request
    mesh: Mesh
    rank: Rank
    corpus: Corpus
    parallel: ParallelModel
    compute: "Callable[[Run, RankBatch], torch.Tensor]"
    """From a batch to the mean loss, a scalar; leaves the gradients on the parameters."""
    update: "Callable[[Run], torch.Tensor]"
    """Clips, updates the weights and drops the gradients. Returns the norm before, a scalar."""
    balance: Balance | None = None
    """The model's, with experts."""
    routing: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """With experts, of each pass of the step: this rank's choices, int64 (L, B, T, k), and how often each
    expert was chosen by all ranks, int64 (L, E)."""
    initial_weights_sha256: str = ""
    """Of rank 0."""
    compile_s: float = 0.0
    state: Progress = field(default_factory=Progress)

    @property
    def experiment(self) -> Experiment:
        """The experiment that is trained."""
        return self.request.experiment

    def mean_over_data(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks that have other data, a scalar, of theirs; it takes the place of `loss`."""
        data = self.mesh.joined(*DATA)
        if data.size > 1:
            data.all_reduce(loss, purpose=LOSS)
            loss /= data.size
        return loss

    def total_over_data(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that have other data; it takes the place of `counts`, of any shape."""
        data = self.mesh.joined(*DATA)
        if data.size > 1:
            data.all_reduce(counts, purpose=ROUTING)
        return counts

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """How often each expert was chosen in the step, (L, E); None without experts."""
        return torch.stack([tokens_LE for _, tokens_LE in self.routing]).sum(0) if self.routing else None


def join_others(rank: Rank, platform: str, reads: Experiment | None = None) -> torch.device:
    """This rank's device, once it is in the group of all ranks.

    Raises ExperimentError on all ranks: the hosts' versions, or their data of `reads`, differ.
    """
    device = torch.device("cuda", gpu_of(rank.local_rank)) if platform == "gpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank.world_size > 1:
        process_groups.join_group(
            rank=rank.rank,
            world_size=rank.world_size,
            device=device,
            rendezvous=rank.rendezvous,
            timeout_s=rank.timeout_s + 30.0,  # longer than the launcher's: it names the lagging rank first
        )
    rank.at(0, "setting up")
    if rank.world_size > 1 and rank.rendezvous is None:
        world = Axis.from_group(process_groups.world_group())
        agree(world.all_gather_objects(facts_here("torchpar", PACKAGES, reads)))
    return device


def to_device(run: Run, arrays: Mapping[str, np.ndarray]) -> RankBatch:
    """This rank's part of a step's arrays, on its device: (A, B, T) -> (A, B / ranks of rows, T / cp)."""
    data, context, device = run.mesh.joined(*ROWS), run.mesh[CP], run.mesh.device

    def own(array_AB: np.ndarray) -> torch.Tensor:
        share = array_AB.shape[1] // data.size
        rows = array_AB[:, data.rank * share : (data.rank + 1) * share]
        if context.size > 1 and rows.dtype != np.uint32:  # the keys are of whole sequences
            order_T = order_of_positions(rows.shape[-1], run.experiment.layout)
            rows = rows[..., np.split(order_T, context.size)[context.rank]]
        # PyTorch looks up int64, and has no arithmetic of unsigned words.
        is_key = rows.dtype == np.uint32
        here = torch.from_numpy(rows.view(np.int32) if is_key else rows.astype(np.int64))
        if device.type == "cuda":  # from pinned memory a copy does not wait for the kernels before it
            here = here.pin_memory()
        return here.to(device, non_blocking=True)

    return RankBatch(*(own(arrays[name]) for name in ("inputs", "targets", "keys") if name in arrays))


def autocast(run: Run) -> AbstractContextManager:
    """Mixed precision in 16 bits, as nanoGPT does it; else nothing.

    Without autocast's cache of cast weights: it would keep every weight that a sharded layout has freed.
    """
    dtype = MIXED.get(run.experiment.precision.dtype)
    if dtype is None:
        return nullcontext()
    return torch.autocast(run.mesh.device.type, dtype=dtype, cache_enabled=False)


def now(device: torch.device) -> float:
    """Time in seconds, after the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
