"""The table of a sweep, what its times are worth, and the command that makes it again."""

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from compare.contract.record import Record
from compare.judge.comparison import Comparison
from compare.present.report.repeat import EXPERIMENT
from compare.show.findings import Column, Row, Table, Text, table_of
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.presets import SETTINGS, Said, layout_flag, settings_in, spread
from compare.studies.sweep_outcome import FIRST, SINGLE, StrategyRow, SweepOutcome
from compare.terminal import human_bytes, layout_in_words

NAMES = (
    Column[StrategyRow]("engine", lambda row: row.engine),
    Column[StrategyRow]("strategy", lambda row: row.strategy),
)
LOSSES = (
    Column[StrategyRow]("mean loss", lambda row: row.mean_loss, ".4f"),
    Column[StrategyRow]("final loss", lambda row: row.final_loss, ".4f"),
)
SCALED = (
    Column[StrategyRow]("devices", lambda row: row.devices, "d"),
    Column[StrategyRow]("batch", lambda row: row.batch_size, "d"),
    Column[StrategyRow]("efficiency", lambda row: row.efficiency, ".0%"),
)
MEAN = Column[StrategyRow]("step, mean (ms)", lambda row: row.step_time_ms_mean, ".1f")
MEDIAN = Column[StrategyRow]("step, median (ms)", lambda row: row.step_time_ms_median, ".1f")
TOKENS = Column[StrategyRow]("tokens/s", lambda row: row.tokens_per_s, ",.0f")
SAMPLES = Column[StrategyRow]("samples/s", lambda row: row.samples_per_s, ",.1f")
COSTS = (
    Column[StrategyRow]("MFU", lambda row: row.mfu, ".1%"),
    Column[StrategyRow]("peak memory", lambda row: row.peak_mem_bytes, human_bytes),
    Column[StrategyRow]("logical bytes", lambda row: row.comm_bytes, human_bytes),
    Column[StrategyRow]("wire bytes", lambda row: row.comm_wire_bytes, human_bytes),
    Column[StrategyRow](
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
    if outcome.scaling != "none":
        figures = (*SCALED, MEAN, TOKENS)
    return table_of(
        headline(outcome), (*NAMES, *figures, *COSTS), outcome.rows, look="upright", below=EXPLAINED, words=1
    )


def headline(outcome: SweepOutcome) -> str:
    """What was swept, in a few words."""
    if outcome.scaling != "none":
        return f"{SCALING_WORDS[outcome.scaling]}, from {outcome.devices[0]} to {outcome.devices[-1]} devices"
    (devices,) = outcome.devices
    return f"Strategies on {devices} {outcome.platform.upper()} device{'s' if devices > 1 else ''}"


def worth(outcome: SweepOutcome) -> str:
    """What the times of this sweep say, and what they do not."""
    once = "One process for each, one after another: an order of magnitude, which does not rank strategies."
    if outcome.platform != "cpu":
        return once
    shared = f"CPU timings: all devices share the {outcome.circumstances.machine.cores} cores of one machine"
    if outcome.scaling == "none":
        return f"{shared}. {once}"
    return (
        f"{shared}: this shows what splitting the work costs, and not what more machines would bring. "
        f"Efficiency does not compare engines: a rank of torchpar has one thread, one device of jaxpar every "
        f"core. {once}"
    )


def layout_table(
    comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]], platform: str
) -> Table:
    """Every strategy in words, once."""
    words: dict[str, str] = {}
    for batch, comparison in comparisons.items():
        for name, record in zip(comparison.cases, records[batch], strict=True):
            label = FIRST if name == FIRST else " on ".join(name.split(".")[1:])
            words.setdefault(label, layout_in_words(record.manifest.experiment, platform))
    rows = [Row(Text(label), [Text(layout)]) for label, layout in words.items()]
    return Table(name="Layouts", corner="strategy", columns=["layout"], rows=rows, look="words")


def own_experiment(outcome: SweepOutcome) -> Experiment:
    """The experiment as a file: on one device if its own layout, which the strategies replace, cannot be."""
    try:
        return revalidate(outcome.experiment)
    except ExperimentError:
        return spread(outcome.experiment, SINGLE)


def repeat_command(outcome: SweepOutcome) -> str:
    """The command that makes this sweep again, in the folder of its page; '' if none does, which is tried."""
    base = own_experiment(outcome)
    flags = {
        key: getattr(outcome.experiment.layout, key) for key in sorted(outcome.said.flags & set(SETTINGS))
    }
    again = msgspec.structs.replace(
        outcome,
        experiment=edited(base, {"layout": flags}),
        said=Said(flags=frozenset(flags), file=settings_in(base.layout)),
    )
    if [batch.cases for batch in again.batches()] != [batch.cases for batch in outcome.batches()]:
        return ""
    options = ["--presets", *outcome.strategies, "--engines", *outcome.engines]
    options += [word for key, value in flags.items() for word in layout_flag(key, value).split()]
    options += ["--devices", *map(str, outcome.devices)]
    if outcome.scaling != "none":
        options += ["--scaling", outcome.scaling]
    if outcome.platform != "cpu":
        options += ["--platform", outcome.platform]
    if not outcome.ladder:
        options.append("--no_ladder")
    if outcome.init_from:
        options += ["--init_from", outcome.init_from]
    return shlex.join(["shardpair", "sweep", EXPERIMENT, *options])
