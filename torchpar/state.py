"""One rank's run: what it trains with, and where it stands."""

from dataclasses import dataclass, field

from compare.contract.data import Corpus
from compare.contract.experiment import Experiment
from compare.contract.request import Request
from compare.contract.stream import OwnBatches
from torchpar.comm.mesh import Mesh
from torchpar.comm.rank import Rank
from torchpar.parallel_model import ParallelModel


@dataclass
class TrainState:
    """State of training, beside the weights and moments, which live in the model and its optimizer.

    Attributes:
        step: the place in the stream of data: the batch to come is `batch(step)`.
        updates: of the weights so far: what the schedule and Adam's bias correction follow.
    """

    step: int = 0
    updates: int = 0


@dataclass
class Run:
    """Everything that one rank trains with."""

    request: Request
    mesh: Mesh
    rank: Rank
    corpus: Corpus | OwnBatches
    parallel: ParallelModel
    initial_weights_sha256: str
    state: TrainState = field(default_factory=TrainState)

    @property
    def experiment(self) -> Experiment:
        """The experiment that is trained."""
        return self.request.experiment
