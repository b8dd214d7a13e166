"""A sweep: one experiment under several strategies, and over several numbers of devices; and what came of it.

A strategy is a preset. What runs with the same batch is one comparison, whose first case is one unsharded
device: so a sweep measures strategies and proves that they compute the same. On one device every strategy is
`single`.

    plain             one number of devices: strategies side by side
    strong scaling    the batch stays, devices grow: the same work is shared out
    weak scaling      the batch grows with the devices: each has as much work as one had alone

Efficiency is throughput per device over that of the smallest number of devices: in both kinds of scaling 1
means that devices cost each other nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, field

from compare.contract.record import Record
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.comparison import Comparison
from compare.judge.costs import cost_of, steady_times_ms
from compare.judge.ladder import Verdict
from compare.judge.outcome import StudyOutcome
from compare.judge.peaks import model_flops_utilization
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.cases import Case
from compare.studies.fitting import refusal
from compare.studies.memory_estimate import require_memory
from compare.studies.presets import NOTHING_SAID, Said, check_presets, spread

SINGLE = "single"
FIRST = "reference"
"""The case that the others of its batch are held against."""

Scaling = Literal["none", "strong", "weak"]


class StrategyRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One strategy on one engine. Times are of steady steps, of one process: an order of magnitude.

    What is None is not written.
    """

    engine: str
    strategy: str
    devices: int
    batch_size: int
    """Sequences in a pass, over all devices."""
    mean_loss: float
    """Over all steps, in nats."""
    final_loss: float
    step_time_ms_mean: float
    step_time_ms_median: float
    tokens_per_s: float
    """Over all devices, at the mean step time."""
    samples_per_s: float
    model_flops_per_s: float
    """Over all devices: `closed_forms.flops`."""
    mfu: float | None = None
    """None for devices without a peak in `judge.peaks`, such as any CPU."""
    peak_mem_bytes: int
    """Of the fullest device."""
    comm_calls: int
    comm_bytes: int
    """Logical bytes of a step: the full tensors."""
    comm_wire_bytes: int
    """Bytes that one device sends in a step, if collectives go round a ring."""
    verdict: str
    """Of the ladder; empty for the reference."""
    passed: bool
    efficiency: float | None = None
    """In scaling; None if what it is held against did not finish."""


class Batch(Struct, frozen=True, kw_only=True):
    """What runs with one batch: one comparison."""

    name: str
    """Of its folder."""
    experiment: Experiment
    cases: list[Case]
    """The reference first. Where one device cannot hold the model there is none, and the others are held
    against the first of them."""
    left_out: dict[str, str]
    """What cannot be a case, and why."""


class SweepOutcome(StudyOutcome, frozen=True, kw_only=True):
    """A sweep as it was asked for, and its rows; its batches' comparisons lie in folders beside.

    The batch of the experiment is that of the step; in weak scaling of one device.
    """

    strategies: list[str]
    """Names in PRESETS."""
    engines: list[str]
    devices: list[int]
    """Increasing; one number where nothing is scaled."""
    scaling: Scaling = "none"
    ladder: bool = True
    init_from: str = ""
    said: Said = NOTHING_SAID
    """Fields of the experiment's layout that win over those of its strategies."""
    rows: list[StrategyRow] = field(default_factory=list)
    """By engine, strategy and number of devices."""
    verdict: str = ""
    """Over everything, in one line; '' before the first batch."""
    passed: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    """What did not finish, and why."""
    device_kind: str = ""

    @property
    def is_blank(self) -> bool:
        """True before the first batch."""
        return not self.verdict

    @property
    def progress(self) -> str:
        """21 rows."""
        return f"{len(self.rows)} rows"

    def sentence(self) -> str:
        """The verdict over everything."""
        return self.verdict

    @property
    def begins_with_one_device(self) -> bool:
        """True if scaling is measured against one device, of each engine."""
        return self.devices[0] == 1

    def with_batch_for(self, devices: int) -> Experiment:
        """The experiment with the batch of so many devices, before it is spread over them."""
        if self.scaling != "weak":
            return self.experiment
        batch_size = devices * self.experiment.train.batch_size
        return edited(self.experiment, {"train": {"batch_size": batch_size}})

    def is_a_row(self, experiment: Experiment) -> bool:
        """Whether a batch's reference is a strategy too: one device, to measure others against."""
        if self.scaling == "none":
            return True
        is_smallest = experiment.train == self.with_batch_for(1).train
        return self.begins_with_one_device and REFERENCE in self.engines and is_smallest

    def batches(self) -> list[Batch]:
        """What is trained, cases named ENGINE.STRATEGY.DEVICES. Raises ExperimentError: nothing is left."""
        batches: dict[str, Batch] = {}
        widest = [(name, self.devices[-1]) for name in self.strategies if name != SINGLE]
        check_presets("--presets", self.experiment.layout, widest, self.said)
        for devices in self.devices:
            experiment = self.with_batch_for(devices)
            name = f"batch-{experiment.train.batch_size}"
            if name not in batches:
                batches[name] = Batch(name=name, experiment=experiment, cases=[], left_out={})
                self._add(batches[name], FIRST, REFERENCE, SINGLE, 1)
            for engine in self.engines:
                for strategy in self.strategies if devices > 1 else [SINGLE]:
                    count = 1 if strategy == SINGLE else devices
                    if not (engine == REFERENCE and strategy == SINGLE):  # that is the reference
                        self._add(batches[name], f"{engine}.{strategy}.{count}", engine, strategy, count)
        kept = [batch for batch in batches.values() if self._is_of_use(batch)]
        if not kept:
            reasons = [why for batch in batches.values() for why in batch.left_out.values()]
            raise ExperimentError(f"no strategy is left: {'; '.join(dict.fromkeys(reasons))}")
        return kept

    def _is_of_use(self, batch: Batch) -> bool:
        """False if nothing is left to hold against the reference, and nobody asked for it alone."""
        asked = SINGLE in self.strategies or self.begins_with_one_device
        alone = asked and REFERENCE in self.engines and self.is_a_row(batch.experiment)
        return any(case.name != FIRST for case in batch.cases) or (alone and bool(batch.cases))

    def _add(self, batch: Batch, name: str, engine: str, strategy: str, devices: int) -> None:
        """Add a case to its batch, once; or the reason why there is none."""
        if name in {case.name for case in batch.cases}:
            return
        try:
            experiment = spread(batch.experiment, strategy, devices, self.said)
            case = Case(name=name, engine=engine, experiment=experiment)
            require_memory(engine, experiment, platform=self.platform)
            why = refusal(ENGINES[engine], experiment.layout, preset=strategy, platform=self.platform)
        except ExperimentError as error:
            why = str(error)
        if why:
            batch.left_out[name] = why
        else:
            batch.cases.append(case)


def with_rows(
    asked: SweepOutcome, comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]]
) -> SweepOutcome:
    """The sweep with what came of its batches.

    Args:
        asked: as it was asked for.
        comparisons: by batch.
        records: by batch, of each finished case.
    """
    finished = [comparison for comparison in comparisons.values() if comparison.cases]
    versions = [found for comparison in finished for found in comparison.versions]
    return msgspec.structs.replace(
        asked,
        circumstances=msgspec.structs.replace(
            asked.circumstances,
            versions={package: version for found in versions for package, version in found.items()},
        ),
        verdict=_verdict(comparisons),
        passed=all(comparison.passed for comparison in comparisons.values()),
        rows=_rows(asked, [(comparison, records[name]) for name, comparison in comparisons.items()]),
        failures=dict(item for one in comparisons.values() for item in one.failures.items()),
        device_kind=finished[0].device_kind if finished else "",
    )


def _verdict(comparisons: Mapping[str, Comparison]) -> str:
    """The verdict over all batches; what was left out is counted, and named in a list of its own."""
    alone = {name: msgspec.structs.replace(one, left_out={}) for name, one in comparisons.items()}
    failed = [f"{name}: {one.sentence()}" for name, one in alone.items() if not one.passed]
    verdicts = [verdict for one in alone.values() for verdict in one.verdicts]
    count = sum(len(one.left_out) for one in comparisons.values())
    if len(alone) == 1:
        said = [one.sentence() for one in alone.values()]
    elif failed:
        said = failed
    elif all(verdict.compared_tensors for verdict in verdicts):
        said = [f"PASS: {len(verdicts)} cases agree with the reference of their batch on every rung"]
    else:
        said = [
            f"PASS: the losses of {len(verdicts)} cases agree with those of the reference of their batch; "
            f"gradients and weights were not compared"
        ]
    return "; ".join([*said, *([f"{count} left out"] if count else [])])


def _rows(
    asked: SweepOutcome, comparisons: Sequence[tuple[Comparison, Sequence[Record]]]
) -> list[StrategyRow]:
    rows = []
    for comparison, records in comparisons:
        verdicts = {verdict.candidate: verdict for verdict in comparison.verdicts}
        for name, record in zip(comparison.cases, records, strict=True):
            if name != FIRST:
                rows.append(_row(record, name.split(".")[1], verdicts.get(name)))
            elif asked.is_a_row(record.manifest.experiment):
                alone, wrong = _row(record, SINGLE, None), "; ".join(comparison.objections)
                verdict = f"FAIL at request: {wrong}" if wrong else alone.verdict
                rows.append(msgspec.structs.replace(alone, passed=not wrong, verdict=verdict))
    engines = list(dict.fromkeys([*([] if REFERENCE in asked.engines else [REFERENCE]), *asked.engines]))
    strategies = list(dict.fromkeys([SINGLE, *asked.strategies]))
    rows.sort(key=lambda row: (engines.index(row.engine), strategies.index(row.strategy), row.devices))
    return [msgspec.structs.replace(row, efficiency=_efficiency(row, rows, asked)) for row in rows]


def _row(record: Record, strategy: str, verdict: Verdict | None) -> StrategyRow:
    experiment, cost = record.manifest.experiment, cost_of(record)
    mean_ms = statistics.fmean(steady_times_ms(record))
    tokens_per_s = experiment.tokens_per_step / (mean_ms / 1e3)
    return StrategyRow(
        engine=cost.engine,
        strategy=strategy,
        devices=cost.devices,
        batch_size=experiment.train.batch_size,
        mean_loss=cost.mean_loss,
        final_loss=cost.final_loss,
        step_time_ms_mean=mean_ms,
        step_time_ms_median=cost.step_time_ms_median,
        tokens_per_s=tokens_per_s,
        samples_per_s=tokens_per_s / experiment.model.block_size,
        model_flops_per_s=model_flops_per_token(experiment) * tokens_per_s,
        mfu=model_flops_utilization(record.manifest, tokens_per_s),
        peak_mem_bytes=cost.peak_mem_bytes,
        comm_calls=cost.comm_calls,
        comm_bytes=cost.comm_bytes,
        comm_wire_bytes=cost.comm_wire_bytes,
        verdict=verdict.sentence() if verdict else "",
        passed=verdict is None or verdict.passed,
    )


def _efficiency(row: StrategyRow, rows: list[StrategyRow], asked: SweepOutcome) -> float | None:
    """Throughput per device over that of the smallest number of devices; None where nothing is scaled."""
    if asked.scaling == "none":
        return None
    strategy = SINGLE if asked.begins_with_one_device else row.strategy
    wanted = (row.engine, strategy, asked.devices[0])
    for base in rows:
        if (base.engine, base.strategy, base.devices) == wanted:
            return (row.tokens_per_s / row.devices) / (base.tokens_per_s / base.devices)
    return None
