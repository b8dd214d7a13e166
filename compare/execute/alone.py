"""One rank of a layout, run by its side without the others, and its ledger beside the closed form."""

import msgspec

from compare.contract.rank_alone import RankAlone, RankAloneRequest
from compare.execute.ask import ask
from compare.execute.launch import EnvironmentMissing, child_environment
from compare.judge.ledger_lines import Line, line_up
from compare.judge.strategy import with_remat_resolved
from compare.spec.engines.registry import side_of
from compare.spec.engines.torch import TORCH
from compare.spec.experiment import Experiment, ExperimentError


def require_alone(engine: str) -> None:
    """Refuse an engine that cannot run a rank by itself. Raises ExperimentError."""
    if side_of(engine).name != TORCH.name:
        raise ExperimentError(
            f"--alone: {engine} is one program for all devices: choose an engine of {TORCH.name}, whose "
            f"ranks are processes"
        )


def lines_alone(
    engine: str, experiment: Experiment, python: str, *, timeout_s: float
) -> tuple[list[Line], list[str]]:
    """What the first rank sends in a step, line by line, and what could not be read.

    Args:
        engine: of torchpar.
        experiment: its layout has at least two devices.
        python: that runs it.
        timeout_s: seconds until it must have ended.

    Raises:
        EnvironmentMissing: it could not, and why.
        ValueError: the layout has no closed form.
    """
    side = side_of(engine)
    request = RankAloneRequest(engine=engine, experiment=experiment)
    question = ["--alone", msgspec.json.encode(request).decode()]
    environment = child_environment(side, "cpu")
    found = ask(side.name, python, question, answer=RankAlone, environment=environment, timeout_s=timeout_s)
    if isinstance(found, str):
        raise EnvironmentMissing(f"--alone: {found}")
    lines = line_up(engine, with_remat_resolved(engine, experiment), found.rows)
    return [line for line in lines if line.stage == 0], found.problems
