"""A run: everything that one rank trains with, and where the training stands."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from compare.contract.communication import LOSS, ROUTING
from compare.contract.request import Request
from compare.numerics.data import Corpus
from compare.side.recording import Progress
from compare.spec.axes import DATA
from compare.spec.experiment import Experiment
from torchpar.batch import RankBatch, shard_batch
from torchpar.comm.mesh import Mesh
from torchpar.engine import Engine
from torchpar.launch import Rank
from torchpar.mlp import Balance

MIXED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Run:
    """Everything that one rank trains with. Weights and moments are in the engine.

    Attributes:
        train_step: from the run, a batch, and a function to call when the gradients are complete, to the loss
            and the gradient norm, both ().
        balance: the model's load-balance loss; None without experts.
        routing: with experts, of each pass of the step: this rank's choices, int64 (L, B, T, k), and how
            often all ranks chose each expert, int64 (L, E).
        initial_weights_sha256: rank 0's; "" on the others.
        compile_s: seconds that compiling took before the first step.
    """

    request: Request
    mesh: Mesh
    rank: Rank
    corpus: Corpus
    engine: Engine
    train_step: "Callable[[Run, RankBatch, Callable[[], None]], tuple[torch.Tensor, torch.Tensor]]"
    state: Progress
    balance: Balance | None = None
    routing: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    initial_weights_sha256: str = ""
    compile_s: float = 0.0

    @property
    def experiment(self) -> Experiment:
        """The experiment that is trained."""
        return self.request.experiment

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """How often each expert was chosen in the step, (L, E); None without experts."""
        return torch.stack([tokens_LE for _, tokens_LE in self.routing]).sum(0) if self.routing else None

    def shard_batch(self, arrays: Mapping[str, np.ndarray]) -> RankBatch:
        """This rank's rows and positions of a step's arrays, on its device."""
        return shard_batch(arrays, self.experiment.layout, self.mesh)

    def autocast(self) -> AbstractContextManager:
        """Mixed precision in 16 bits, as nanoGPT has it; otherwise an empty context.

        The cache of cast weights is off: it would keep every weight that a sharded layout has freed.
        """
        dtype = MIXED.get(self.experiment.precision.dtype)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=dtype, cache_enabled=False)

    def mean_over_data(self, loss: torch.Tensor) -> torch.Tensor:
        """Replace `loss`, (), by its mean over the ranks that have other data."""
        data = self.mesh.joined(*DATA)
        if data.size > 1:
            data.all_reduce(loss, purpose=LOSS)
            loss /= data.size
        return loss

    def total_over_data(self, counts: torch.Tensor) -> torch.Tensor:
        """Replace `counts`, of any shape, by its sum over the ranks that have other data."""
        data = self.mesh.joined(*DATA)
        if data.size > 1:
            data.all_reduce(counts, purpose=ROUTING)
        return counts


def now(device: torch.device) -> float:
    """Time in seconds, once the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
