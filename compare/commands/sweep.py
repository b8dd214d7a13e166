"""`shardpair sweep`: one experiment under several strategies and settings, side by side.

A strategy is a preset. Each is held against one unsharded device with its batch and its settings: so a sweep
measures strategies, and proves that they compute the same.
"""

from pathlib import Path
from typing import Any

import msgspec

from compare.execute.launch import require_devices
from compare.flags import EngineName, chosen_engines
from compare.judge.metrics import METRICS
from compare.judge.outcome import Grid, Outcome
from compare.numerics.parameters import parameter_count
from compare.run.study import Study
from compare.setup.fitting import require_memory
from compare.setup.grid import against_one_device
from compare.setup.presets import CLASSIC, PRESETS, check_names, check_presets, edits_of, spread
from compare.show.findings import Column, Findings, table_of, verdict_findings
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.theory.flops import model_flops_per_token

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
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all of the grid."""
    presets: tuple[str, ...] = ()
    """Strategies, by the names of `shardpair list`. Default: ddp, zero1, zero2, fsdp, tp."""
    devices: int = 2
    """How many devices each strategy is spread over."""
    variants: tuple[str, ...] = ()
    """Settings in which each strategy is trained once more, such as precision.dtype=bfloat16."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no_ladder compares losses and norms alone."""

    brief = "strategies side by side, each held to one device"
    group = "Train and compare"
    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """Every strategy and setting on every engine. Raises ExperimentError."""
        strategies = self.presets or CLASSIC
        check_names("--presets", "preset", strategies, PRESETS)
        over = {name: 1 if name == "single" else self.devices for name in strategies}
        wide = [(name, self.devices) for name in over if name != "single"]
        check_presets("--presets", experiment.layout, wide, self.said)
        rows, left_out = {}, {}
        for variant in ("", *self.variants):
            whole = edited(experiment, edits_of(variant))
            for strategy, devices in over.items():
                row = ", ".join(filter(None, (f"{strategy}.{devices}", variant)))
                try:
                    sharded = spread(whole, strategy, devices, self.said)
                    require_devices(sharded, self.platform)
                    require_memory(REFERENCE, sharded, platform=self.platform)
                    rows[row] = sharded
                except ExperimentError as error:
                    left_out[row] = str(error)
        asked = {"as_presets": "schedule" not in self.said.flags, "ladder": self.ladder}
        cases, refused = against_one_device(chosen_engines(self.engines), rows, **asked)
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
                f"operations a token. One process for each, one after another: an order of magnitude, which "
                f"does not rank strategies. On a CPU all devices share its cores.",
            ],
            tables=[table_of("Strategies side by side", COLUMNS, rows, below=BELOW, words=2 + any_setting)],
        )
        value = {"rows": rows, "passed": found.passed, "verdict": found.sentence, "result": outcome}
        return msgspec.structs.replace(found, value=value)


def rows_of(outcome: Outcome) -> list[Row]:
    """The rows with their verdicts."""
    verdicts, rows = {verdict.candidate: verdict for verdict in outcome.verdicts}, []
    # A reference has the setting of what is held against it.
    settings = {case.against or name: case.row.partition(", ")[2] for name, case in outcome.cases.items()}
    for name, figures in outcome.values(dict).items():
        case, verdict = outcome.cases[name], verdicts.get(name)
        row = {
            "engine": case.engine,
            "strategy": case.row.partition(".")[0] if case.against else "single",
            "variant": case.row.partition(", ")[2] if case.against else settings[name],
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
    "Memory is of the fullest device, communication the full tensors of one device in a steady step. The "
    "verdict is of the ladder, against one unsharded device."
)
