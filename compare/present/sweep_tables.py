"""The classic table of a sweep, in the terminal and on the page, and what its times are worth."""

from collections.abc import Callable

from rich.table import Table as RichTable

from compare.present.report.tables import NONE, Row, Table, Text
from compare.present.tables import by_reason
from compare.studies.sweep import SweepPlan
from compare.studies.sweep_outcome import Row as Strategy
from compare.studies.sweep_outcome import SweepOutcome
from compare.terminal.console import coloured, print_json, results_console
from compare.terminal.units import human_bytes

PAGE = "sweep.html"
Cell = Callable[[Strategy], str]

COLUMNS: dict[str, Cell] = {
    "mean loss": lambda row: f"{row.mean_loss:.4f}",
    "final loss": lambda row: f"{row.final_loss:.4f}",
    "step, mean (ms)": lambda row: f"{row.step_time_ms_mean:.1f}",
    "step, median (ms)": lambda row: f"{row.step_time_ms_median:.1f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:,.0f}",
    "samples/s": lambda row: f"{row.samples_per_s:,.1f}",
    "MFU": lambda row: NONE if row.mfu is None else f"{row.mfu:.1%}",
    "peak memory": lambda row: human_bytes(row.peak_mem_bytes),
    "logical bytes": lambda row: human_bytes(row.comm_bytes),
    "wire bytes": lambda row: human_bytes(row.comm_wire_bytes),
}
SCALED: dict[str, Cell] = {
    "devices": lambda row: str(row.devices),
    "batch": lambda row: str(row.batch_size),
    "efficiency": lambda row: NONE if row.efficiency is None else f"{row.efficiency:.0%}",
}
LEFT_OUT_OF_SCALING = ("mean loss", "final loss", "step, median (ms)", "samples/s")
SCALING_WORDS = {"strong": "Strong scaling: the batch stays", "weak": "Weak scaling: the batch grows"}


def columns(outcome: SweepOutcome) -> dict[str, Cell]:
    """The figures that this sweep's table has."""
    chosen = dict(COLUMNS)
    if outcome.plan.scaling != "none":
        chosen = SCALED | {name: cell for name, cell in COLUMNS.items() if name not in LEFT_OUT_OF_SCALING}
    if all(row.mfu is None for row in outcome.rows):
        chosen.pop("MFU")
    return chosen


def headline(plan: SweepPlan) -> str:
    """What was swept, in a few words."""
    if plan.scaling != "none":
        return f"{SCALING_WORDS[plan.scaling]}, from {plan.devices[0]} to {plan.devices[-1]} devices"
    (devices,) = plan.devices
    return f"Strategies on {devices} {plan.platform.upper()} device{'s' if devices > 1 else ''}"


def worth(outcome: SweepOutcome) -> str:
    """What the times of this sweep say, and what they do not."""
    once = "One process for each, one after another: an order of magnitude, which does not rank strategies."
    if outcome.plan.platform != "cpu":
        return once
    shared = f"CPU timings: all devices share the {outcome.cores} cores of one machine"
    if outcome.plan.scaling == "none":
        return f"{shared}. {once}"
    return (
        f"{shared}: this shows what splitting the work costs, and not what more machines would bring. "
        f"Efficiency does not compare engines: a rank of torchpar has one thread, one device of jaxpar every "
        f"core. {once}"
    )


def print_sweep(outcome: SweepOutcome, *, as_json: bool) -> None:
    """The table and the verdict, on stdout."""
    if as_json:
        print_json(outcome)
        return
    console, figures = results_console(), columns(outcome)
    table = RichTable(title=headline(outcome.plan), caption=worth(outcome), caption_justify="left")
    for name in ("engine", "strategy", *figures, "verdict"):
        is_figure = name in figures
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=not is_figure)
    engine = ""
    for row in outcome.rows:
        if engine and row.engine != engine:
            table.add_section()
        engine = row.engine
        verdict = coloured(verdict_of(row), "green" if row.passed else "red")
        table.add_row(row.engine, row.strategy, *(cell(row) for cell in figures.values()), verdict)
    console.print(table)
    for why, names in by_reason(outcome.left_out).items():
        console.print(f"left out: {', '.join(names)}: {why}", soft_wrap=True)
    for name, why in outcome.failures.items():
        console.print(f"{name} did not finish: {why}", style="red", soft_wrap=True)
    console.print(outcome.sentence, style="bold green" if outcome.passed else "bold red", soft_wrap=True)


def verdict_of(row: Strategy) -> str:
    """PASS, the rung that failed, or that it is what others are held against."""
    return row.verdict or "reference"


def page_table(outcome: SweepOutcome) -> Table:
    """The same table for the page."""
    figures, several = columns(outcome), len({row.engine for row in outcome.rows}) > 1
    rows = [
        Row(
            Text(row.strategy, row.engine if several else ""),
            [
                *(Text(cell(row)) for cell in figures.values()),
                Text(verdict_of(row), news="pass" if row.passed else "fail"),
            ],
        )
        for row in outcome.rows
    ]
    return Table(
        name="Strategies", corner="strategy", columns=[*figures, "verdict"], rows=rows, look="upright"
    )
