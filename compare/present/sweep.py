"""What a sweep found: its table, losses, step times and memory of strategies, or throughput over devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from compare.contract.record import Record
from compare.judge.circumstances import made_by
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.comparison import Comparison, how_to_go_on
from compare.numerics.parameters import parameter_count
from compare.present.report.sweep_repeat import own_experiment, repeat_command
from compare.present.report.tables import manifest_table
from compare.present.sweep_figures import figures_of, losses
from compare.show.findings import Column, Findings, Row, Table, Text, table_of
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import to_toml
from compare.studies.sweep import FIRST, SweepPlan
from compare.studies.sweep_outcome import Row as Strategy
from compare.studies.sweep_outcome import SweepOutcome
from compare.terminal.layout_words import layout_in_words
from compare.terminal.units import human_bytes

PAGE = "sweep.html"
NAMES = (
    Column[Strategy]("engine", lambda row: row.engine),
    Column[Strategy]("strategy", lambda row: row.strategy),
)
LOSSES = (
    Column[Strategy]("mean loss", lambda row: row.mean_loss, ".4f"),
    Column[Strategy]("final loss", lambda row: row.final_loss, ".4f"),
)
SCALED = (
    Column[Strategy]("devices", lambda row: row.devices, "d"),
    Column[Strategy]("batch", lambda row: row.batch_size, "d"),
    Column[Strategy]("efficiency", lambda row: row.efficiency, ".0%"),
)
MEAN = Column[Strategy]("step, mean (ms)", lambda row: row.step_time_ms_mean, ".1f")
MEDIAN = Column[Strategy]("step, median (ms)", lambda row: row.step_time_ms_median, ".1f")
TOKENS = Column[Strategy]("tokens/s", lambda row: row.tokens_per_s, ",.0f")
SAMPLES = Column[Strategy]("samples/s", lambda row: row.samples_per_s, ",.1f")
COSTS = (
    Column[Strategy]("MFU", lambda row: row.mfu, ".1%"),
    Column[Strategy]("peak memory", lambda row: row.peak_mem_bytes, human_bytes),
    Column[Strategy]("logical bytes", lambda row: row.comm_bytes, human_bytes),
    Column[Strategy]("wire bytes", lambda row: row.comm_wire_bytes, human_bytes),
    Column[Strategy](
        "verdict",
        lambda row: row.verdict or "reference",
        news=lambda row: "pass" if row.passed else "fail",
    ),
)
SCALING_WORDS = {"strong": "Strong scaling: the batch stays", "weak": "Weak scaling: the batch grows"}
EXPLAINED = (
    "Loss in nats. Peak memory of the fullest device. Logical bytes: the full tensors that one device "
    "communicates in a steady step; wire bytes: what it sends, if collectives go round a ring. The verdict "
    "is of the ladder, against one unsharded device; `shardpair report` of a batch's folder shows every rung."
)


def sweep_table(outcome: SweepOutcome) -> Table:
    """A row for each strategy on each engine."""
    figures = (*LOSSES, MEAN, MEDIAN, TOKENS, SAMPLES)
    if outcome.plan.scaling != "none":
        figures = (*SCALED, MEAN, TOKENS)
    return table_of(
        headline(outcome.plan), (*NAMES, *figures, *COSTS), outcome.rows, look="upright", below=EXPLAINED
    )


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


def findings_of_sweep(
    outcome: SweepOutcome,
    comparisons: Mapping[str, Comparison],
    records: Mapping[str, Sequence[Record]],
    folder: Path,
) -> Findings:
    """Everything that is shown of a sweep.

    Args:
        outcome: what came of it.
        comparisons: by batch.
        records: by batch, of each finished case.
        folder: of the sweep.
    """
    plan = outcome.plan
    undone = [name for one in comparisons.values() for name in one.not_run]
    by_engine = {record.manifest.engine: record for found in records.values() for record in reversed(found)}
    first = next(iter(comparisons))
    experiment = plan.experiment
    return Findings(
        title=f"{plan.name}: {headline(plan)[0].lower()}{headline(plan)[1:]}",
        sentence=outcome.sentence,
        value=outcome,
        passed=outcome.passed,
        about=[
            f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
            f"{experiment.precision.dtype}, {model_flops_per_token(experiment):.3g} floating-point "
            f"operations a token. {outcome.machine}, {outcome.device_kind}. "
            f"{outcome.created_utc[:16].replace('T', ' ')} UTC.",
            worth(outcome),
        ],
        missing={
            **{name: f"did not finish: {why}" for name, why in outcome.failures.items()},
            **dict.fromkeys(undone, "did not run"),
        },
        continuation=how_to_go_on(comparisons[first], folder.absolute() / first),
        tables=[sweep_table(outcome)],
        details=[
            _layout_table(comparisons, records, plan),
            *(
                msgspec.structs.replace(manifest_table(name, record), name=f"{name}: {ENGINES[name].decides}")
                for name, record in by_engine.items()
            ),
        ],
        figures=figures_of(outcome, by_engine),
        drawn=lambda: losses(plan, comparisons, records),
        left_out=outcome.left_out,
        spec=to_toml(own_experiment(plan)),
        command=repeat_command(plan),
        source=f"{made_by(outcome.git_commit, outcome.git_dirty)}.",
    )


def _layout_table(
    comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]], plan: SweepPlan
) -> Table:
    """Every strategy in words, once."""
    words: dict[str, str] = {}
    for batch, comparison in comparisons.items():
        for name, record in zip(comparison.cases, records[batch], strict=True):
            label = FIRST if name == FIRST else " on ".join(name.split(".")[1:])
            words.setdefault(label, layout_in_words(record.manifest.experiment, plan.platform))
    rows = [Row(Text(label), [Text(layout)]) for label, layout in words.items()]
    return Table(name="Layouts", corner="strategy", columns=["layout"], rows=rows, look="words")
