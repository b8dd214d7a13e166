"""Benches made by hand: what rounds of processes would leave, without running any."""

from collections.abc import Sequence
from typing import Any

import msgspec

from compare.commands.bench import Bench
from compare.commands.bench.outcome import Measurement, TimedOutcome, read_timings
from compare.contract.timing import Timing, Window
from compare.judge.outcome import Case, Grid, Outcome
from compare.spec.experiment import Experiment
from tests.support.records import MADE

TIMING = Timing(window=2, windows=3, single=4)
STEPS = Timing().steps
"""Number of points of a curve, as in a bench."""
RAN = {"device_kind": "a CPU", "threads": "one", "gradient_sync": "none", "remat": "none"}


def grid_of(experiment: Experiment, **choice: Any) -> Grid:
    """The cases that engines, presets, sizes and variants make, and what is left out."""
    chosen = {"engines": ("torch-manual", "torch-library"), "window": 2, "windows": 3} | choice
    return Bench(**chosen).cases(experiment)


def cases_of(experiment: Experiment, **choice: Any) -> list[Case]:
    return list(grid_of(experiment, **choice)[0].values())


def bench_of(
    cases: list[Case],
    *,
    measurements: Sequence[tuple[str, int, Measurement]] = (),
    rounds: int = 5,
    baseline: str = "",
    **given: Any,
) -> TimedOutcome:
    """A bench of these cases, as it has saved these measurements."""
    kept: dict[str, dict[int, Measurement]] = {}
    for name, number, process in measurements:
        kept.setdefault(name, {})[number] = msgspec.to_builtins(process)
    return read_timings(
        Outcome(
            study="bench",
            experiment=cases[0].experiment,
            circumstances=MADE,
            rounds=rounds,
            cases={case.name: case for case in cases},
            kept=kept,
            options={"baseline": baseline or cases[0].engine},
            **{"name": "bench-tiny"} | given,
        )
    )


def measurement_of(
    case: Case, number: int, *, wall_ms: float = 10.0, **given: Any
) -> tuple[str, int, Measurement]:
    """One process whose every step took `wall_ms`, with two CPU seconds for each second."""
    window = Window(
        steps=TIMING.window, wall_s=TIMING.window * wall_ms / 1e3, cpu_s=TIMING.window * wall_ms / 500
    )
    figures: dict[str, Any] = {
        "windows": [window] * TIMING.windows,
        "single_ms": [1.1 * wall_ms] * TIMING.single,
        "compile_s": 0.5,
        "first_step_s": 0.2,
        "start_up_s": 2.0,
        "peak_mem_bytes": 10**7,
        "curves": {
            "loss": given.pop("losses", [2.5] * STEPS),
            "grad_norm": given.pop("grad_norms", [1.0] * STEPS),
        },
        "how": RAN,
    }
    return case.name, number, Measurement(**figures | given)
