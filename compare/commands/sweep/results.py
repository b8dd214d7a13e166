"""Results of a sweep: rows of its tables, means over seeds, a CSV file, and loss curves."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from compare.contract.record import Record
from compare.judge.outcome import Case, Outcome
from compare.run.metrics import METRICS
from compare.setup.presets import edits_of, setting_without
from compare.show.figures import Axes, Figure, curves, reduce_windows
from compare.show.findings import Column, Table, table_of
from compare.spec.experiment import SAME_NUMBERS, Experiment, edited

LOSSES = ("final_loss", "mean_loss", "validation_loss", "best_validation_loss")
SHOWN = (*LOSSES, "step_time_ms_median", "tokens_per_s", "mfu", "peak_mem_bytes", "comm_bytes")
CSV = "sweep.csv"
SEED = "train.seed="


Row = dict[str, Any]
"""Figures of METRICS for one strategy on one engine."""


def rows_of(outcome: Outcome) -> list[Row]:
    """The rows with their verdicts."""
    verdicts, rows = {verdict.candidate: verdict for verdict in outcome.verdicts}, []
    for name, figures in outcome.values(dict).items():
        case, verdict = outcome.cases[name], verdicts.get(name)
        row = {
            "engine": case.engine,
            "strategy": _strategy(case),
            "variant": case.coordinates.get("variant", ""),
            "verdict": verdict.sentence() if verdict else "not compared" if case.against else "",
            "passed": verdict.passed if verdict else not case.against,
        }
        rows.append({**figures, **row})
    return rows


def means_over_seeds(outcome: Outcome) -> list[Row]:
    """The mean and standard deviation of each loss over cases that differ only in train.seed."""
    groups: dict[tuple[str, Experiment], list[str]] = {}
    for name in outcome.finished:
        case = outcome.cases[name]
        groups.setdefault((case.engine, edited(case.experiment, {"train": {"seed": 0}})), []).append(name)
    figures, rows = outcome.values(dict), []
    for names in groups.values():
        if len(names) < 2:
            continue
        case = outcome.cases[names[0]]
        row: Row = {"engine": case.engine, "strategy": _strategy(case), "seeds": len(names)}
        row["variant"] = setting_without(case.coordinates.get("variant", ""), SEED)
        for loss in LOSSES:
            values = [figures[name][loss] for name in names if loss in figures[name]]
            if len(values) == len(names):
                row[loss] = {"mean": statistics.fmean(values), "stdev": statistics.stdev(values)}
        rows.append(row)
    return rows


def tables_of(rows: Sequence[Row], seeds: Sequence[Row]) -> list[Table]:
    """A row for each strategy, setting and engine; and for each of them with several seeds."""
    side_by_side = table_of("Strategies side by side", COLUMNS, rows, below=BELOW, words=2 + _settings(rows))
    if not seeds:
        return [side_by_side]
    return [side_by_side, table_of("Over seeds", OVER_SEEDS, seeds, below=SPREAD, words=1 + _settings(seeds))]


def csv_of(outcome: Outcome) -> str:
    """A line for each case: its coordinates, the fields that variants change, its verdict and its figures."""
    fields = dict.fromkeys(
        (section, field)
        for case in outcome.cases.values()
        for section, edits in edits_of(case.coordinates.get("variant", "")).items()
        for field in edits
    )
    figures, verdicts = outcome.values(dict), {verdict.candidate: verdict for verdict in outcome.verdicts}
    lines = []
    for name, case in outcome.cases.items():
        settings = msgspec.to_builtins(case.experiment)
        line: dict[str, Any] = {"case": name, "engine": case.engine, "strategy": _strategy(case)}
        line |= {"devices": case.experiment.layout.devices, "reference": case.against}
        line |= {f"{section}.{field}": settings[section][field] for section, field in fields}
        line["verdict"] = verdicts[name].sentence() if name in verdicts else outcome.undone.get(name, "")
        lines.append(line | {metric.key: figures.get(name, {}).get(metric.key) for metric in METRICS})
    measured = {key for line in lines for key, value in line.items() if value is not None}
    keys, text = [key for key in lines[0] if key in measured], io.StringIO()
    writer = csv.DictWriter(text, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def loss_figures(outcome: Outcome, records: Mapping[str, Record]) -> list[Figure]:
    """Training and validation loss over steps, a curve for each setting that changes numbers."""
    losses = {"Training": {}, "Validation": {}}
    for name, record in records.items():
        setting = setting_without(
            outcome.cases[name].coordinates.get("variant", ""), SEED, "layout.", SAME_NUMBERS
        )
        points = {
            "Training": [(step.step, step.loss) for step in record.steps],
            "Validation": [(one.step, one.validation) for one in record.evaluations],
        }
        for which, pairs in points.items():
            for step, loss in pairs:
                of_setting = losses[which].setdefault(setting or "default", {})
                of_setting.setdefault(step, []).append(loss)
    caption = "The mean of all cases of a setting: engines, layouts and seeds. The band is their range."
    return [
        Figure(title=f"{which} loss over steps", caption=caption, draw=partial(draw_losses, lines))
        for which, lines in losses.items()
        if lines
    ]


def draw_losses(losses: Mapping[str, Mapping[int, Sequence[float]]], axes: Axes) -> None:
    """Draw the mean of each setting's losses over steps, with a band from the least to the largest."""
    means = {
        name: {step: statistics.fmean(own) for step, own in line.items()} for name, line in losses.items()
    }
    curves(axes, means, "loss (nats)")
    for curve, line in zip(axes.lines, losses.values(), strict=True):
        curve.set_linewidth(1.6)
        starts, lows = reduce_windows([min(own) for own in line.values()], statistics.fmean)
        _, highs = reduce_windows([max(own) for own in line.values()], statistics.fmean)
        steps = list(line)
        axes.fill_between(
            [steps[start] for start in starts], lows, highs, color=curve.get_color(), alpha=0.25, linewidth=0
        )


def _settings(rows: Sequence[Row]) -> bool:
    return any(row["variant"] for row in rows)


def _strategy(case: Case) -> str:
    return case.coordinates["layout"].partition(".")[0] if case.against else "single"


PLACE = (
    Column[Row]("engine", lambda row: row["engine"]),
    Column[Row]("strategy", lambda row: row["strategy"]),
    Column[Row]("setting", lambda row: row["variant"] or None),
)
COLUMNS = (
    *PLACE,
    Column[Row](
        "verdict",
        lambda row: row["verdict"] or "reference",
        news=lambda row: "pass" if row["passed"] else "fail",
    ),
    *(
        Column[Row](metric.label, lambda row, key=metric.key: row.get(key), metric.form)
        for metric in METRICS
        if metric.key in SHOWN
    ),
)
OVER_SEEDS = (
    *PLACE,
    Column[Row]("seeds", lambda row: row["seeds"], "d"),
    *(
        Column[Row](
            metric.label,
            lambda row, key=metric.key: "{mean:.4f} ± {stdev:.4f}".format(**row[key]) if key in row else None,
        )
        for metric in METRICS
        if metric.key in LOSSES
    ),
)
BELOW = (
    "Memory is for the fullest device, communication the full tensors of one device in a steady step. "
    "The verdict compares with one unsharded device."
)
SPREAD = f"Mean ± standard deviation (n - 1) over cases that differ only in train.seed. {CSV} has each case."
