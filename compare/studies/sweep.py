"""`shardpair sweep`: one experiment under several strategies and settings, or numbers of devices.

    plain             one number of devices: strategies side by side
    strong scaling    the batch stays, devices grow: the same work is shared out
    weak scaling      the batch grows with the devices: each has as much work as one had alone

A strategy is a preset. Each is held against one unsharded device with its batch and its settings: so a sweep
measures strategies, and proves that they compute the same.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from compare.execute.launch import require_devices
from compare.flags import EngineName, chosen_engines
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.metrics import METRICS
from compare.judge.outcome import Grid, Outcome
from compare.numerics.parameters import parameter_count
from compare.show.findings import Column, Findings, Table, table_of
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.fitting import Fit, as_it_is, as_preset, require_memory
from compare.studies.grid import against_one_device
from compare.studies.presets import CLASSIC, PRESETS, check_names, check_presets, edits_of, spread
from compare.studies.run import verdict_findings
from compare.study import Study

DEVICES, SCALED = (2,), (1, 2, 4)
Scaling = Literal["none", "strong", "weak"]

SHOWN = (
    *("final_loss", "mean_loss", "step_time_ms_median", "tokens_per_s"),
    *("mfu", "peak_mem_bytes", "comm_bytes"),
)


Row = dict[str, Any]
"""One strategy on one engine, of one process: an order of magnitude. Figures are those of METRICS."""


class Sweep(Study, frozen=True, kw_only=True):
    """Train one experiment under several strategies: compare loss, time, memory, throughput, communication.

    Every strategy is held to one unsharded device, rung by rung. Times are of one process for each, one after
    another: an order of magnitude, and no ranking. What an engine refuses is left out by name.

    Try:
      shardpair sweep demo --engines torch-manual
      shardpair sweep demo --presets single --variants precision.dtype=bfloat16
      shardpair sweep demo --scaling strong --presets ddp fsdp --engines jax-manual torch-manual
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all of the grid."""
    presets: tuple[str, ...] = ()
    """Strategies, by the names of `shardpair list`. Default: ddp, zero1, zero2, fsdp, tp."""
    devices: tuple[int, ...] = ()
    """How many devices each strategy is spread over; several with --scaling. Default: 2, in scaling 1 2 4."""
    scaling: Scaling = "none"
    """Over growing numbers of devices: strong keeps the batch, weak gives each device the experiment's batch.
    Efficiency is throughput per device, over that of the smallest number."""
    variants: tuple[str, ...] = ()
    """Settings in which each strategy is trained once more, such as precision.dtype=bfloat16."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no_ladder compares losses and norms alone."""

    brief = "strategies side by side, or over growing numbers of devices"
    group = "Train and compare"
    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """Every strategy, setting and number of devices on every engine. Raises ExperimentError."""
        strategies, devices = self.presets or CLASSIC, self._devices()
        check_names("--presets", "preset", strategies, PRESETS)
        widest = [(name, devices[-1]) for name in strategies if name != "single"]
        check_presets("--presets", experiment.layout, widest, self.said)
        rows, left_out = {}, {}
        for count, variant in itertools.product(devices, ("", *self.variants)):
            whole = edited(experiment, edits_of(variant))
            if self.scaling == "weak":
                whole = edited(whole, {"train": {"batch_size": count * experiment.train.batch_size}})
            for strategy in strategies if count > 1 else ("single",):
                number = 1 if strategy == "single" else count
                row = ", ".join(filter(None, (f"{strategy}.{number}", variant)))
                try:
                    rows[row] = spread(whole, strategy, number, self.said)
                    require_devices(rows[row], self.platform)
                    require_memory(REFERENCE, rows[row], platform=self.platform)
                except ExperimentError as error:
                    left_out[row] = str(error)
                    rows.pop(row, None)
        fit: Fit = as_it_is if "schedule" in self.said.flags else as_preset
        cases, refused = against_one_device(chosen_engines(self.engines), rows, fit=fit, ladder=self.ladder)
        # One device of the reference's engine is the reference.
        again = {
            name
            for name, case in cases.items()
            if case.against and case.request == cases[case.against].request
        }
        return {name: case for name, case in cases.items() if name not in again}, left_out | refused

    def _devices(self) -> tuple[int, ...]:
        given = self.devices or (DEVICES if self.scaling == "none" else SCALED)
        words = " ".join(map(str, given))
        if min(given) < 1 or sorted(set(given)) != list(given):
            raise ExperimentError(f"--devices {words}: give each number once, rising from 1")
        if self.scaling == "none" and len(given) > 1:
            raise ExperimentError(f"--devices {words}: give one number, or --scaling strong or weak")
        if self.scaling != "none" and len(given) == 1:
            raise ExperimentError(f"--scaling {self.scaling} --devices {words}: give two numbers or more")
        return given

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A row for each strategy on each engine; in scaling with throughput over devices."""
        rows, experiment = rows_of(outcome), outcome.experiment
        found = verdict_findings(
            outcome,
            title=f"{outcome.name}: {len(rows)} rows",
            about=[
                f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
                f"{experiment.precision.dtype}, {model_flops_per_token(experiment):.3g} floating-point "
                f"operations a token. One process for each, one after another: an order of magnitude, which "
                f"does not rank strategies. On a CPU all devices share its cores.",
            ],
            tables=[sweep_table(rows, scaled=is_scaled(outcome))],
        )
        value = {"rows": rows, "passed": found.passed, "verdict": found.sentence, "result": outcome}
        return msgspec.structs.replace(found, value=value)


def is_scaled(outcome: Outcome) -> bool:
    """True if its rows are of several numbers of devices."""
    return outcome.options.get("scaling", "none") != "none"


def rows_of(outcome: Outcome) -> list[Row]:
    """The rows with their verdicts, in scaling with efficiencies."""
    verdicts, rows = {verdict.candidate: verdict for verdict in outcome.verdicts}, []
    # A reference has the setting of what is held against it.
    settings = {case.against or name: case.row.partition(", ")[2] for name, case in outcome.cases.items()}
    for name, figures in outcome.values(dict).items():
        case, verdict = outcome.cases[name], verdicts.get(name)
        row = {
            "engine": case.engine,
            "strategy": case.row.partition(".")[0] if case.against else "single",
            "variant": case.row.partition(", ")[2] if case.against else settings[name],
            "batch_size": case.experiment.train.batch_size,
            "verdict": verdict.sentence() if verdict else "",
            "passed": verdict is None or verdict.passed,
        }
        rows.append({**figures, **row})
    for row in rows if is_scaled(outcome) else ():
        row["efficiency"] = _efficiency(row, rows)
    return rows


def _efficiency(row: Row, rows: list[Row]) -> float:
    """Throughput per device over that of the smallest number of devices."""
    of_engine = [other for other in rows if all(other[key] == row[key] for key in ("engine", "variant"))]
    alike = [other for other in of_engine if other["strategy"] in (row["strategy"], "single")]
    base = min(alike, key=lambda other: other["devices"])
    return (row["tokens_per_s"] / row["devices"]) / (base["tokens_per_s"] / base["devices"])


def sweep_table(rows: Sequence[Row], *, scaled: bool) -> Table:
    """A row for each strategy on each engine."""
    scaling = {"devices": "d", "batch_size": "d", "efficiency": ".0%"} if scaled else {}
    columns: list[Column[Row]] = [
        Column("engine", lambda row: row["engine"]),
        Column("strategy", lambda row: row["strategy"]),
        Column("setting", lambda row: row["variant"] or None),
        *(Column(key, lambda row, key=key: row[key], form) for key, form in scaling.items()),
        *(
            Column(metric.label, lambda row, key=metric.key: row.get(key), metric.form)
            for metric in METRICS
            if metric.key in SHOWN
        ),
        Column(
            "verdict",
            lambda row: row["verdict"] or "reference",
            news=lambda row: "pass" if row["passed"] else "fail",
        ),
    ]
    below = (
        "Memory is of the fullest device, communication the full tensors of one device in a steady step. The "
        "verdict is of the ladder, against one unsharded device."
    )
    title = "Strategies over devices" if scaled else "Strategies side by side"
    return table_of(title, columns, rows, below=below, words=1)
