"""Sweeps made by hand: what their cases would leave, without running any."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from records import MADE, comparison_of, make_record, make_steps

from compare.contract.record import Record
from compare.judge.comparison import Comparison, judged
from compare.judge.outcome import save
from compare.spec.experiment import Experiment
from compare.studies.cases import Case
from compare.studies.sweep_outcome import SweepOutcome, with_rows

StepTime = Callable[[Case], float]
"""A case's step time in ms."""


def plan_of(experiment: Experiment, **given) -> SweepOutcome:
    """A sweep of torch-manual over two strategies on two devices, and what is given instead."""
    asked = {"strategies": ["ddp", "fsdp"], "engines": ["torch-manual"], "devices": [2], "ladder": False}
    asked |= {"study": "sweep", "name": "sweep-test", "platform": "cpu", "circumstances": MADE}
    return SweepOutcome(experiment=experiment, **asked | given)


def swept(
    plan: SweepOutcome,
    folder: Path,
    step_ms: StepTime = lambda case: 10.0,
    *,
    wrong: tuple[str, ...] = (),
    steps_left: int = 0,
) -> tuple[SweepOutcome, dict[str, Comparison], dict[str, list[Record]]]:
    """The outcome of a sweep whose cases all finish; those that are `wrong` have other losses, and the last
    `steps_left` steps are missing from all."""
    comparisons, records = {}, {}
    for batch in plan.batches():
        found = {}
        for case in batch.cases:
            off = 1.1 if case.name in wrong else 1.0
            steps = [
                msgspec.structs.replace(step, loss=off * step.loss, step_time_ms=step_ms(case))
                for step in make_steps(case.experiment)
            ]
            steps = steps[: len(steps) - steps_left]
            found[case.name] = make_record(
                folder / batch.name / case.name,
                case.experiment,
                engine=case.engine,
                steps=steps,
                ladder=False,
                tensors={},
            )
        planned = comparison_of(
            batch.experiment,
            study="run",
            circumstances=MADE,
            requests={name: record.request for name, record in found.items()},
            left_out=batch.left_out,
        )
        comparisons[batch.name] = judged(planned, found)
        records[batch.name] = list(found.values())
        save(comparisons[batch.name], folder / batch.name)
    return with_rows(plan, comparisons, records), comparisons, records
