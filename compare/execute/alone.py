"""One rank of a layout, run by its side without the others."""

import msgspec

from compare.contract.rank_alone import RankAlone, RankAloneRequest
from compare.execute.ask import ask
from compare.execute.launch import EnvironmentMissing, child_environment
from compare.spec.axes import SHARDED_FROM
from compare.spec.engines.registry import ENGINES, TORCH, side_of
from compare.spec.experiment import Experiment, ExperimentError, Layout


def require_alone(engine: str, layout: Layout) -> None:
    """Refuse an engine, or a layout of it, of which no rank can run by itself. Raises ExperimentError."""
    if layout.devices == 1:
        raise ExperimentError("--alone: one device has no others")
    if side_of(engine).name != TORCH.name:
        raise ExperimentError(
            f"--alone: {engine} is one program for all devices: choose an engine of {TORCH.name}, whose "
            f"ranks are processes"
        )
    by_ddp = layout.tp == 1 and layout.data_parallel > 1 and layout.zero < SHARDED_FROM["gradients"]
    if ENGINES[engine].sends_by == "pytorch" and (layout.pp > 1 or by_ddp):
        waits = "PyTorch's pipeline" if layout.pp > 1 else "DistributedDataParallel"
        raise ExperimentError(
            f"--alone: {engine}: {waits} waits for answers, which ranks that are not there do not give: "
            f"choose torch-manual, or fully sharded layouts"
        )


def run_alone(engine: str, experiment: Experiment, python: str, *, timeout_s: float) -> RankAlone:
    """A step of the first rank.

    Args:
        engine: of torchpar.
        experiment: its layout has at least two devices.
        python: that runs it.
        timeout_s: seconds until it must have ended.

    Raises:
        EnvironmentMissing: it could not, and why.
    """
    side = side_of(engine)
    request = RankAloneRequest(engine=engine, experiment=experiment)
    question = ["--alone", msgspec.json.encode(request).decode()]
    environment = child_environment(side, "cpu")
    found = ask(side.name, python, question, answer=RankAlone, environment=environment, timeout_s=timeout_s)
    if isinstance(found, str):
        raise EnvironmentMissing(f"--alone: {found}")
    return found
