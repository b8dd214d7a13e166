"""`shardpair check`: every engine under any layouts against one unsharded device, or against nanoGPT."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from compare.execute.folders import check_output
from compare.flags import DEVICES, EngineName, PresetNames, chosen_engines
from compare.judge.goldens import NANOGPT
from compare.judge.outcome import Grid, Outcome
from compare.judge.verdict import TRACED, Verdict
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.grid import against_one_device, grid, pivot, vary
from compare.setup.presets import edits_of, several_presets, spread
from compare.show.findings import Findings, Text, verdict_findings
from compare.show.markdown import markdown
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, load, revalidate
from compare.system.disk import write_atomically

SHOWN = ("gradients", "later_weights")
"""Rungs whose errors a cell of the grid shows."""
VARIANTS = (
    "precision.dtype=float32",
    "optimizer.name=sgd,optimizer.momentum=0.9,optimizer.grad_clip=0,optimizer.learning_rate=0.1,"
    "optimizer.min_lr=0.01",
    "model.dropout=0.2",
)
"""`--variants all`: SGD without clipping hides nothing of a gradient's scale."""
GOLDEN, SGD = "golden", {"name": "sgd", "momentum": 0.9}
"""The experiment that nanoGPT was run on, and what the second golden's optimizer has other than it."""
ERRORS = "Worst relative error of a gradient / of a later weight"
ERROR_OF_TRACE = "Worst relative error of a module's output, or of its gradient"
PAGE = """Each engine under each layout, against one unsharded device (PyTorch, no wrapper, no
collective). An error is the largest difference of a tensor, divided by its largest entry: of gradients before
clipping, and of weights after at most 20 steps. A dash: the engine rejects the layout. (gpipe): the engine
has no 1F1B there."""


class Check(Study, frozen=True, kw_only=True):
    """Compare engines with one unsharded device, tensor by tensor, or with nanoGPT's own train.py.

    Without --presets each engine runs each of its gradient synchronisations. The experiment is tiny and in
    float64 unless you name another. Nothing is timed. If the first forward or backward is wrong, a trace
    names the first module whose output or gradient differs, and the devices.

    Try:
      shardpair check
      shardpair check --presets fsdp tp --variants precision.dtype=float32
      shardpair check --presets all --variants all --output parity.md
      shardpair check --against nanogpt --presets fsdp --devices 2
      shardpair check --presets tp cp_ring --engines torch-manual --trace
    """

    engines: tuple[EngineName, ...] = ()
    """Engines. Default: all except peers."""
    devices: int | None = None
    """Devices of data parallelism, or of each of --presets. Default: 4; of a preset 2, 4 or 8."""
    presets: PresetNames = ()
    """Layouts by name, or `all`, each on every engine that can express it."""
    variants: tuple[str, ...] = ()
    """Settings in which each of --presets is trained once more, such as precision.dtype=float32; or `all`:
    float32, SGD, dropout."""
    against: Literal["", "nanogpt"] = ""
    """nanogpt: compare with nanoGPT's numbers, on its experiment, with AdamW and with SGD."""
    numbers_only: bool = False
    """Compare no strategies: an engine may reach the same numbers in another way than the layout's."""
    trace: bool = False
    """Also compare the output of each module in the first step, and its gradient. A failure in forward or
    backward is traced anyway."""
    output: Path | None = None
    """Also write the tables as Markdown to this file."""

    default = "check"
    fixed: ClassVar = OF_LAYOUTS
    needs: ClassVar = {**Study.needs, "variants": "presets"}
    keeps_records = True
    needs_reference = True

    def resolve(self) -> Experiment:
        """The experiment; against nanoGPT its own, unchanged. Raises ExperimentError."""
        check_output("--output", self.output)
        if self.devices is not None and self.devices < 1:
            raise ExperimentError(f"--devices {self.devices} must be at least 1")
        if not self.against:
            return super().resolve()
        given = sorted(self.fields_given | self.given & {"variants", "init_from"})
        if given or self.experiment not in (self.default, GOLDEN):
            wrong = f"--{given[0]}" if given else self.experiment
            raise ExperimentError(
                f"{wrong} has no effect: nanoGPT was run on the experiment {GOLDEN}; leave it out"
            )
        return load(GOLDEN)

    def cases(self, experiment: Experiment) -> Grid:
        """Each case, after its reference. Raises ExperimentError."""
        engines = chosen_engines(self.engines)
        presets = several_presets(self.presets, experiment.model, self.devices)
        if self.against:
            return against_nanogpt(experiment, engines, presets)
        if not presets:
            return rungs_of_engines(experiment, engines, self.devices or DEVICES)
        variants = self.variants
        if variants == ("all",):
            variants = [one for one in VARIANTS if edited(experiment, edits_of(one)) != experiment]
        layouts = {name: (name, devices) for name, devices in presets.items()}
        rows, refused = vary(experiment, layouts, variants, skips=self.presets == ("all",))
        cases, left_out = against_one_device(engines, rows, as_presets=True)
        whole_rows = {f"{engine}.{row}": why for engine in engines for row, why in refused.items()}
        return cases, left_out | whole_rows

    def needs_trace(self, verdict: Verdict) -> bool:
        """True with --trace, and for a failure in the first forward or backward."""
        return self.trace or bool(verdict.failure and verdict.failure.rung in TRACED)

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A grid: a row for each layout and setting, a column for each engine."""
        verdicts = {verdict.candidate: verdict for verdict in outcome.verdicts}
        dtype, traced = outcome.experiment.precision.dtype, bool(outcome.options.get("trace"))
        skipped = [
            f"{verdict.candidate} was not compared: {why}"
            for verdict in outcome.verdicts
            for why in verdict.skipped.values()
            if outcome.options.get("against")  # every rung has to be there
        ]
        return verdict_findings(
            outcome,
            title=f"{outcome.name}: {len(outcome.finished)} cases",
            sentence=skipped[0] if skipped and outcome.passed else "",
            tables=[
                pivot(f"{ERRORS}, {dtype}", outcome, lambda name: cell_of(outcome, name, verdicts.get(name))),
                *([pivot(ERROR_OF_TRACE, outcome, lambda name: cell_of_trace(verdicts.get(name)))] * traced),
            ],
            passed=outcome.passed and not skipped,
        )

    def end(self, outcome: Outcome, folder: Path) -> Outcome:
        """Write --output."""
        if self.output:
            versions = ", ".join(map(" ".join, outcome.circumstances.versions.items()))
            head = f"# Parity\n\nWritten by `{outcome.line}`, not by hand. {versions}.\n\n{PAGE}\n\n"
            text = f"{head}{markdown(self.findings(outcome, folder))}\n"
            write_atomically(self.output, text.encode())
        return outcome


def rungs_of_engines(experiment: Experiment, engines: Iterable[str], devices: int) -> Grid:
    """The unsharded reference, then every engine on one device and with each gradient synchronisation."""
    single = spread(experiment, "single")
    cases, left_out = against_one_device(engines, [({"layout": "1"}, single)])
    for name in engines:
        engine = ENGINES[name]
        for sync in engine.gradient_sync if devices > 1 else ():
            chosen = sync if engine.offers_choice else experiment.layout.gradient_sync
            layout = {"dp_replicate": devices, "gradient_sync": chosen}
            sharded = revalidate(edited(single, {"layout": layout}))
            rows = [({"layout": f"{devices}-{sync}"}, sharded)]
            more, out = grid([name], rows, against="reference", ladder=True)
            cases, left_out = cases | more, left_out | out
    return cases, left_out


def against_nanogpt(experiment: Experiment, engines: list[str], presets: dict[str, int]) -> Grid:
    """Each engine and layout, with AdamW and with SGD."""
    rows = []
    by_sgd = revalidate(edited(experiment, {"optimizer": SGD}))
    for optimizer, spec in (("", experiment), ("sgd", by_sgd)):
        layouts = [(name, spread(spec, name, devices)) for name, devices in presets.items()]
        for name, sharded in layouts or [("", spec)]:
            rows.append(({"layout": ".".join(filter(None, (name, optimizer)))}, sharded))
    later_step = experiment.train.max_iters
    return grid(engines, rows, against=NANOGPT, ladder=True, later_step=later_step)


def cell_of(outcome: Outcome, name: str, verdict: Verdict | None) -> Text:
    """A cell of the grid: the errors of `SHOWN` and a schedule other than the preset's; or the failure."""
    if verdict is None:
        return Text(outcome.undone[name], news="fail")
    if not verdict.passed:
        return Text(verdict.sentence(), news="fail")
    errors = (verdict.error(rung) for rung in SHOWN)
    text = " / ".join("?" if error is None else f"{error:.0e}" for error in errors)
    case = outcome.cases[name]
    is_other = case.experiment.layout.schedule == "gpipe" and case.coordinates.get("layout") != "pp_gpipe"
    return Text(f"{text} (gpipe)" if is_other else text)


def cell_of_trace(verdict: Verdict | None) -> Text:
    """A cell of the grid of traces: the largest error, or the first place that differs."""
    if not (verdict and verdict.trace):
        return Text(verdict.untraced if verdict else "")
    return Text(verdict.trace.sentence() if verdict.trace.place else f"{verdict.trace.error:.0e}")
