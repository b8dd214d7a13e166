"""`shardpair sweep`: one experiment under several strategies and settings, side by side.

A strategy is a preset. Each is compared with one unsharded device that has its batch and its settings.
"""

from pathlib import Path
from typing import Any

import msgspec

from compare.execute.launch import require_devices
from compare.flags import EngineName, PresetNames, chosen_engines
from compare.judge.outcome import Grid, Outcome
from compare.numerics.parameters import parameter_count
from compare.run.metrics import METRICS
from compare.run.study import Study
from compare.setup.fitting import require_memory
from compare.setup.grid import against_one_device, vary
from compare.setup.presets import CLASSIC, PRESETS, check_names, check_presets
from compare.show.findings import Column, Findings, table_of, verdict_findings
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError
from compare.theory.flops import model_flops_per_token

SHOWN = (
    *("final_loss", "mean_loss", "step_time_ms_median", "tokens_per_s"),
    *("mfu", "peak_mem_bytes", "comm_bytes"),
)


Row = dict[str, Any]
"""Figures of METRICS for one strategy on one engine."""


class Sweep(Study, frozen=True, kw_only=True):
    """Train one experiment under several layouts: compare loss, time, memory, throughput, communication.

    Every layout is compared with one unsharded device, rung by rung. Each is timed once, in one process: do
    not rank layouts by it, use `bench`. Layouts that an engine rejects are named and skipped.

    Try:
      shardpair sweep demo --engines torch-manual
      shardpair sweep demo --presets single --variants precision.dtype=bfloat16
    """

    engines: tuple[EngineName, ...] = ()
    """Engines. Default: all except peers."""
    presets: PresetNames = CLASSIC
    devices: int = 2
    """Devices of each strategy."""
    variants: tuple[str, ...] = ()
    """Settings in which each strategy is trained once more, such as precision.dtype=bfloat16."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size. --no_ladder compares losses and norms only."""

    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """Every strategy and setting on every engine. Raises ExperimentError."""
        check_names("--presets", "preset", self.presets, PRESETS)
        if self.devices < 1:
            raise ExperimentError(f"--devices {self.devices} must be at least 1")
        over = {name: 1 if name == "single" else self.devices for name in self.presets}
        wide = [(name, devices) for name, devices in over.items() if name != "single"]
        check_presets(experiment.layout, wide, self.layout_flags)
        layouts = {f"{name}.{devices}": (name, devices) for name, devices in over.items()}
        rows, left_out = vary(experiment, layouts, self.variants, flags=self.layout_flags, skips=True)
        for coordinates, sharded in list(rows):
            try:
                require_devices(sharded, self.platform)
                require_memory(REFERENCE, sharded, platform=self.platform)
            except ExperimentError as error:
                left_out[", ".join(coordinates.values())] = str(error)
                rows.remove((coordinates, sharded))
        as_presets = "schedule" not in self.layout_flags
        engines = chosen_engines(self.engines)
        cases, refused = against_one_device(engines, rows, as_presets=as_presets, ladder=self.ladder)
        # One device of the reference's engine is the reference.
        kept = {
            name: case
            for name, case in cases.items()
            if not case.against or case.request != cases[case.against].request
        }
        return kept, left_out | refused

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A row for each strategy on each engine."""
        rows, experiment = rows_of(outcome), outcome.experiment
        any_setting = any(row["variant"] for row in rows)
        found = verdict_findings(
            outcome,
            title=f"{outcome.name}: {len(rows)} rows",
            about=[
                f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
                f"{experiment.precision.dtype}, {model_flops_per_token(experiment):.3g} floating-point "
                f"operations a token. Each is timed once, in one process: do not rank strategies by it, use "
                f"`bench`. On a CPU all devices share its cores.",
            ],
            tables=[table_of("Strategies side by side", COLUMNS, rows, below=BELOW, words=2 + any_setting)],
        )
        value = {"rows": rows, "passed": found.passed, "verdict": found.sentence, "result": outcome}
        return msgspec.structs.replace(found, value=value)


def rows_of(outcome: Outcome) -> list[Row]:
    """The rows with their verdicts."""
    verdicts, rows = {verdict.candidate: verdict for verdict in outcome.verdicts}, []
    for name, figures in outcome.values(dict).items():
        case, verdict = outcome.cases[name], verdicts.get(name)
        row = {
            "engine": case.engine,
            "strategy": case.coordinates["layout"].partition(".")[0] if case.against else "single",
            "variant": case.coordinates.get("variant", ""),
            "verdict": verdict.sentence() if verdict else "not compared" if case.against else "",
            "passed": verdict.passed if verdict else not case.against,
        }
        rows.append({**figures, **row})
    return rows


COLUMNS = (
    Column[Row]("engine", lambda row: row["engine"]),
    Column[Row]("strategy", lambda row: row["strategy"]),
    Column[Row]("setting", lambda row: row["variant"] or None),
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
BELOW = (
    "Memory is for the fullest device, communication the full tensors of one device in a steady step. "
    "The verdict compares with one unsharded device."
)
