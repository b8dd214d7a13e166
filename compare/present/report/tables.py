"""The tables of a report as data: the template only lays them out."""

from collections.abc import Sequence

from compare.contract.record import Record
from compare.judge.costs import Cost
from compare.judge.ladder import LADDER, Verdict, rungs_of
from compare.judge.outcome import Outcome
from compare.judge.strategy import done_words
from compare.present.report.beside import MeasuredCeiling
from compare.present.tables import cost_rows
from compare.show.findings import Row, Table, Text
from compare.terminal import error_text, human_bytes, layout_in_words

NONE, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
MANY = 6
"""Columns that a page has room for."""
RATIOS = {
    "step time, median (ms)": "step_time_ms_median",
    "step time, p95 (ms)": "step_time_ms_p95",
    "tokens/s, at the median step": "tokens_per_s",
    "CPU time, all in all (s)": "cpu_time_s",
    "peak memory per device": "peak_mem_bytes",
    "collectives per step": "comm_calls",
    "communicated per step": "comm_bytes",
}
"""Rows of the cost table that say how many times the reference's they are, and the figure they show."""


def upright(table: Table) -> Table:
    """The table with rows for columns if it has many of these: a page is longer than it is broad."""
    if len(table.columns) <= MANY:
        return table
    rows = [
        Row(Text(column), [row.cells[place] for row in table.rows])
        for place, column in enumerate(table.columns)
    ]
    heads = [row.head.text for row in table.rows]
    return Table(name=table.name, corner="case", columns=heads, rows=rows, look="upright")


def cost_table(comparison: Outcome, ceilings: Sequence[MeasuredCeiling | None] = ()) -> Table:
    """Every case's figures, with the ratios of those that can be compared to the first case's.

    Args:
        comparison: its costs.
        ceilings: for each case the fastest matrix products that are known of its machine.
    """
    rows = []
    for label, cells in cost_rows(comparison):
        notes = (
            _ratios([getattr(cost, RATIOS[label]) for cost in comparison.costs]) if label in RATIOS else []
        )
        texts = [Text(cell, note) for cell, note in zip(cells, notes or [""] * len(cells), strict=True)]
        rows.append(Row(Text(label), texts))
    if any(ceilings):
        shares = [_share_of_ceiling(cost, one) for cost, one in zip(comparison.costs, ceilings, strict=True)]
        rows.append(Row(Text("of the ceiling", "fastest matrix products here"), shares))
    return upright(Table(name="Costs", corner="figure", columns=comparison.finished, rows=rows))


def _share_of_ceiling(cost: Cost, measured: MeasuredCeiling | None) -> Text:
    """The model's operations as a share of the machine's fastest products: all cores, or one GPU each."""
    if measured is None:
        return Text(NONE)
    ceiling = measured.ceiling
    most = ceiling.flops_per_s * (1 if ceiling.threads else cost.devices)
    return Text(f"{cost.model_flops_per_s / most:.1%}", f"of {most / 1e9:,.0f} GFLOP/s, {measured.study}")


def _ratios(values: Sequence[float]) -> list[str]:
    first, *others = values
    return ["", *(f"{TIMES}{value / first:.2f}" if first else "" for value in others)]


def ladder_table(verdicts: list[Verdict]) -> Table:
    """Every case's error on every rung, with the worst tensor or step, and the tolerance."""
    rows = []
    for rung in rungs_of(verdicts):
        found = [next((one for one in verdict.rungs if one.rung == rung), None) for verdict in verdicts]
        tolerance = next((_tolerance(one.tolerance) for one in found if one), NONE)
        cells = []
        for verdict, result in zip(verdicts, found, strict=True):
            if result is None:
                cells.append(Text("not compared", verdict.skipped.get(rung, "")))
                continue
            where = result.worst if result.error else ""
            cells.append(Text(error_text(result.error), where, "pass" if result.passed else "fail"))
        rows.append(Row(Text(rung.replace("_", " ")), [Text(tolerance), *cells]))
    columns = ["tolerance", *(verdict.candidate for verdict in verdicts)]
    return upright(Table(name="The ladder", corner="rung", columns=columns, rows=rows))


def tolerance_reasons(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    """Rung, tolerance and its reason, for every rung that was compared."""
    reasons = {
        one.rung: (one.rung.replace("_", " "), _tolerance(one.tolerance), one.reason)
        for verdict in verdicts
        for one in verdict.rungs
    }
    return [reasons[rung] for rung in LADDER if rung in reasons]


def _tolerance(limit: float) -> str:
    return "exact" if limit == 0 else f"{limit:.0e}"


def layout_table(comparison: Outcome, records: list[Record]) -> Table:
    """Each case's engine and layout in words, for cases that differ in them."""
    rows = [
        Row(
            Text(name),
            [
                Text(record.manifest.engine),
                Text(layout_in_words(record.manifest.experiment, comparison.platform)),
                Text(done_words(record).gradient_sync),
            ],
        )
        for name, record in zip(comparison.finished, records, strict=True)
    ]
    columns = ["engine", "layout", "gradient synchronisation"]
    return Table(name="Layouts", corner="case", columns=columns, rows=rows, look="words")


def manifest_table(name: str, record: Record) -> Table:
    """Circumstances of one case. Its experiment and its bytes at rest have places of their own."""
    manifest, done = record.manifest, done_words(record)
    facts = {
        "engine": manifest.engine,
        "devices": f"{manifest.devices} x {manifest.device_kind} ({manifest.platform})",
        "threads": manifest.threads,
        "versions": ", ".join(f"{package} {version}" for package, version in manifest.versions.items()),
        "gradient synchronisation": done.gradient_sync,
        "recomputed in backward": done.remat,
        "compiled by": done.compiled,
        "parameters": f"{manifest.parameters:,}",
        "started (UTC)": manifest.started_utc,
        "compilation (s)": f"{manifest.compile_s:.2f}",
        "first step (s)": f"{manifest.first_step_s:.2f}",
        "CPU time (s)": f"{manifest.cpu_time_s:.1f}",
        "peak memory, by device": ", ".join(human_bytes(peak) for peak in manifest.peak_memory_bytes),
        "peak memory is": manifest.peak_memory_method,
        "initial weights, SHA-256": manifest.initial_weights_sha256,
        "data, SHA-256": manifest.corpus_sha256,
    }
    rows = [Row(Text(fact), [Text(value or NONE)]) for fact, value in facts.items()]
    return Table(name=f"How {name} was run", corner="fact", columns=["value"], rows=rows, look="words")
