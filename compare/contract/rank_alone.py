"""One rank of a layout, run without the others: what a side is asked for, and what it prints."""

import msgspec
from msgspec import Struct

from compare.contract.communication import Communication
from compare.contract.memory_profile import DeviceMemory
from compare.spec.experiment import Experiment, ExperimentError, revalidate


class RankAloneRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which engine, which layout, which rank."""

    engine: str
    experiment: Experiment
    rank: int = 0


class RankAlone(Struct, frozen=True, kw_only=True):
    """A step of that rank."""

    rows: list[Communication]
    """Its ledger."""
    memory: DeviceMemory
    """Bytes of all tensors over the step, by class."""
    problems: list[str] = []
    """What could not be read: the ledger is incomplete."""


def read_rank_alone_request(text: str) -> RankAloneRequest:
    """The request from JSON, checked. Raises ExperimentError for any other text."""
    try:
        request = msgspec.json.decode(text, type=RankAloneRequest)
    except msgspec.MsgspecError as error:
        raise ExperimentError(f"--alone: {' '.join(str(error).split())}") from None
    revalidate(request.experiment)
    if not 0 <= request.rank < request.experiment.layout.devices > 1:
        devices = request.experiment.layout.devices
        raise ExperimentError(f"--alone: rank = {request.rank} of {devices} devices: there must be others")
    return request
