"""The outcome of a command on stdout: tables for people, or one JSON object."""

from collections.abc import Callable, Mapping

from msgspec import UNSET, UnsetType
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compare.contract.record import Record
from compare.judge.comparison import Comparison
from compare.judge.costs import Cost
from compare.judge.ladder import Verdict, rungs_of
from compare.studies.faults import planted
from compare.terminal.console import coloured, print_json, results_console
from compare.terminal.units import error_text, human_bytes


def print_outcome(comparison: Comparison, *, as_json: bool) -> None:
    """Print what `run` and `report` say: the ladder, the costs, the verdict."""
    if as_json:
        print_json(comparison)
        return
    console = results_console()
    if comparison.verdicts:
        console.print(ladder_table(comparison))
    console.print(cost_table(comparison))
    _print_removed(console, comparison)
    _print_verdict(console, comparison.sentence(), comparison.passed)


def print_check(comparison: Comparison, *, as_json: bool) -> None:
    """Print what `check` says: worst errors of every case against the one reference."""
    if as_json:
        print_json(comparison)
        return
    console = results_console()
    table = Table(
        title=f"Relative errors against one unsharded device ({comparison.experiment.precision.dtype})"
    )
    for column in ("case", "loss", "gradients", "worst gradient", "weights after N steps", "worst weight"):
        table.add_column(column, justify="right" if column in ("loss", "gradients") else "left")
    table.add_column("verdict")
    for verdict in comparison.verdicts:
        table.add_row(
            verdict.candidate,
            rung_cell(verdict, "loss"),
            *_worst(verdict, "gradients"),
            *_worst(verdict, "later_weights"),
            _mark(verdict),
        )
    console.print(table)
    _print_removed(console, comparison)
    _print_verdict(console, comparison.sentence(), comparison.passed)
    for rung in ("gradients", "later_weights") if comparison.verdicts else ():
        errors = {verdict.candidate: verdict.error(rung) or 0.0 for verdict in comparison.verdicts}
        worst = max(errors, key=errors.__getitem__)
        console.print(f"worst of {rung}: {error_text(errors[worst])} ({worst})")


def print_faults(comparison: Comparison, *, as_json: bool) -> None:
    """Print what `faults` says: each planted mistake, and the rung that caught it."""
    if as_json:
        print_json(comparison)
        return
    console = results_console()
    table = Table(title="Planted faults, and the rung that caught each")
    for column in ("fault", "engine", "expected rung", "caught at", "where", "error", ""):
        table.add_column(column)
    wrong = 0
    for verdict in comparison.verdicts:
        fault, engine = planted(verdict.candidate)
        failure = verdict.failure
        right = failure is not None and failure.rung == fault.rung
        wrong += not right
        found = (failure.rung, failure.worst, error_text(failure.error)) if failure else ("nothing", "", "")
        table.add_row(
            fault.name,
            engine,
            fault.rung,
            *found,
            coloured("ok", "green") if right else coloured("WRONG", "red"),
        )
    console.print(table)
    total = sum("." in name for name in comparison.requests)  # the others are references
    caught = len(comparison.verdicts) - wrong
    _print_verdict(console, f"{caught} of {total} faults caught at the right rung", caught == total)
    if not comparison.is_complete:
        _print_verdict(console, comparison.sentence(), False)


def ladder_table(comparison: Comparison) -> Table:
    """Every case's error on every rung against the first case."""
    table = Table(title=f"The ladder: relative errors against {comparison.cases[0]}")
    table.add_column("rung")
    for verdict in comparison.verdicts:
        table.add_column(verdict.candidate, justify="right")
    for rung in rungs_of(comparison.verdicts):
        table.add_row(rung, *(rung_cell(verdict, rung) for verdict in comparison.verdicts))
    return table


def cost_table(comparison: Comparison) -> Table:
    """Every case's loss, time, memory and communication: a column for each case."""
    table = Table(title=f"Costs ({comparison.platform.upper()} timings, one process each, not interleaved)")
    table.add_column("per engine")
    for name in comparison.cases:
        table.add_column(name, justify="right")
    for label, cells in cost_rows(comparison):
        table.add_row(label, *cells)
    return table


_COST_CELLS: dict[str, Callable[[Cost], str]] = {
    "gradient synchronisation": lambda cost: cost.gradient_sync,
    "recomputed in backward": lambda cost: cost.remat,
    "compiled by": lambda cost: cost.compiled,
    "final loss (nats)": lambda cost: f"{cost.final_loss:.4f}",
    "mean loss (nats)": lambda cost: f"{cost.mean_loss:.4f}",
    "validation loss (nats)": lambda cost: _nats(cost.validation_loss),
    "best validation loss (nats)": lambda cost: _nats(cost.best_validation_loss),
    "steps skipped, last loss scale": lambda cost: cost.skipped_steps,
    "step time, median (ms)": lambda cost: f"{cost.step_time_ms_median:.1f}",
    "step time, p95 (ms)": lambda cost: f"{cost.step_time_ms_p95:.1f}",
    "tokens/s, at the median step": lambda cost: f"{cost.tokens_per_s:,.0f}",
    "tokens seen": lambda cost: f"{cost.tokens_seen:,}" if cost.tokens_seen else "",
    "GFLOP/s of the model": lambda cost: f"{cost.model_flops_per_s / 1e9:,.1f}" if cost.tokens_seen else "",
    "MFU, of the devices' peak": lambda cost: "" if cost.mfu is UNSET else f"{cost.mfu:.1%}",
    "compilation, or cache read (s)": lambda cost: f"{cost.compile_s:.2f}",
    "first step (s)": lambda cost: f"{cost.first_step_s:.2f}",
    "CPU time, all in all (s)": lambda cost: f"{cost.cpu_time_s:.1f}",
    "peak memory per device": lambda cost: human_bytes(cost.peak_mem_bytes),
    "collectives per step": lambda cost: str(cost.comm_calls),
    "communicated per step": lambda cost: human_bytes(cost.comm_bytes),
}


def _nats(loss: float | UnsetType) -> str:
    """A loss; nothing where nobody evaluated."""
    return "" if loss is UNSET else f"{loss:.4f}"


def cost_rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """The rows of the cost table, as text: what the terminal and the report both show."""
    rows = [(label, [cell(cost) for cost in comparison.costs]) for label, cell in _COST_CELLS.items()]
    return [(label, cells) for label, cells in rows if any(cells)]


REMOVED = "tensors were removed after they had passed: their rungs are those judged then"


def _print_removed(console: Console, comparison: Comparison) -> None:
    if comparison.tensors_removed:
        console.print(f"{REMOVED} (run --keep_tensors keeps them)", style="dim", soft_wrap=True)


def _print_verdict(console: Console, sentence: str, good: bool) -> None:
    console.print(sentence, style="bold green" if good else "bold red", soft_wrap=True, markup=False)


def _mark(verdict: Verdict) -> Text:
    if verdict.failure is None:
        return coloured("PASS", "green")
    return coloured(f"FAIL at {verdict.failure.rung}", "red")


def rung_cell(verdict: Verdict, rung: str) -> str | Text:
    """One rung's error as a cell: red if it is too large, - if the rung was not compared."""
    result = next((result for result in verdict.rungs if result.rung == rung), None)
    if result is None:
        return "-"
    text = error_text(result.error)
    return text if result.passed else coloured(text, "red")


def _worst(verdict: Verdict, rung: str) -> tuple[str | Text, str]:
    result = next((result for result in verdict.rungs if result.rung == rung), None)
    return rung_cell(verdict, rung), result.worst if result else ""


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Names with the same reason together."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return names


def how_peaks(names: list[str], records: list[Record]) -> str:
    """Methods by which cases measured their peaks; cases with the same one are named together."""
    by_method: dict[str, list[str]] = {}
    for name, record in zip(names, records, strict=True):
        by_method.setdefault(record.manifest.peak_memory_method, []).append(name)
    return "; ".join(f"{', '.join(names)}: {method}" for method, names in by_method.items()) + "."
