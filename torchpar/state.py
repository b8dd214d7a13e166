"""One rank's run: what it trains with, and where it stands."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from compare.contract.progress import Progress
from compare.contract.request import Request
from compare.numerics.data import Corpus
from compare.numerics.stream import OwnBatches
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.comm.rank import Rank
from torchpar.parallel_model import ParallelModel


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
    corpus: Corpus | OwnBatches
    parallel: ParallelModel
    initial_weights_sha256: str = ""
    """Of rank 0."""
    compile_s: float = 0.0
    state: Progress = field(default_factory=Progress)

    @property
    def experiment(self) -> Experiment:
        """The experiment that is trained."""
        return self.request.experiment
