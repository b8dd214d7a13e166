"""Cells and rows that several tables share."""

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from compare.contract.record import Record
from compare.judge.costs import Cost
from compare.judge.ladder import Verdict
from compare.judge.outcome import Outcome
from compare.show.findings import NONE, Text
from compare.terminal import error_text, human_bytes

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


def cost_rows(comparison: Outcome) -> list[tuple[str, list[str]]]:
    """The rows of the cost table, as text: what the terminal and the report both show."""
    rows = [(label, [cell(cost) for cost in comparison.costs]) for label, cell in _COST_CELLS.items()]
    return [(label, cells) for label, cells in rows if any(cells)]


REMOVED = "tensors were removed after they had passed: their rungs are those judged then"


def rung_text(verdict: Verdict, rung: str) -> Text:
    """One rung's error as a cell: bad news if it is too large, - if the rung was not compared."""
    result = next((result for result in verdict.rungs if result.rung == rung), None)
    if result is None:
        return Text(NONE)
    return Text(error_text(result.error), news="" if result.passed else "fail")


def how_peaks(names: list[str], records: list[Record]) -> str:
    """Methods by which cases measured their peaks; cases with the same one are named together."""
    by_method: dict[str, list[str]] = {}
    for name, record in zip(names, records, strict=True):
        by_method.setdefault(record.manifest.peak_memory_method, []).append(name)
    return "; ".join(f"{', '.join(names)}: {method}" for method, names in by_method.items()) + "."
