"""`shardpair check`: every engine under any layouts against one unsharded device, or against nanoGPT."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from compare.execute.folders import check_output
from compare.flags import EngineName, chosen_engines
from compare.judge.goldens import NANOGPT
from compare.judge.ladder import Verdict
from compare.judge.outcome import Grid, Outcome
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.grid import against_one_device, grid, pivot, varied
from compare.setup.presets import several_presets, spread
from compare.show.findings import Findings, Text, verdict_findings
from compare.show.markdown import markdown
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, load, revalidate
from compare.system.disk import write_atomically

SHOWN = ("gradients", "later_weights")
"""Rungs whose errors a cell of the grid shows."""
DEVICES = 4
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
PAGE = """Each engine under each layout, against ONE unsharded device (PyTorch, no container, no
collective). An error is the largest difference of a tensor over its largest entry: of gradients before
clipping, of weights after 20 steps at most. A dash: the engine refuses the layout. (gpipe): it has no 1F1B
there."""


class Check(Study, frozen=True, kw_only=True):
    """Prove that engines compute what one unsharded device computes: every engine and gradient
    synchronisation, or every engine under every layout; or what nanoGPT's own train.py computed in 30 steps.

    The experiment is a tiny one in float64 unless you name another; nothing is timed.

    Try:
      shardpair check
      shardpair check --presets fsdp tp --variants precision.dtype=float32
      shardpair check --presets all --variants all --output parity.md
      shardpair check --against nanogpt --presets fsdp --devices 2
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all of the grid."""
    devices: int | None = None
    """Devices of data parallelism, or of each of --presets. Default: 4; of a preset 2, 4 or 8."""
    presets: tuple[str, ...] = ()
    """Layouts by name, or `all`, each on every engine that can express it."""
    variants: tuple[str, ...] = ()
    """With --presets: other settings, in which each layout is trained once more, such as
    precision.dtype=float32; or `all`: float32, SGD, dropout."""
    against: Literal["", "nanogpt"] = ""
    """nanogpt: hold engines against nanoGPT's numbers, on its experiment, by AdamW and by SGD."""
    output: Path | None = None
    """Also write the tables as Markdown."""

    brief = "every engine against one unsharded device, or nanoGPT"
    group = "Prove"
    default = "check"
    fixed: ClassVar = OF_LAYOUTS
    keeps_records = True
    needs_reference = True

    @property
    def title(self) -> str:
        """Against nanoGPT, of presets, or of how many devices."""
        return f"check-{self.against or ('presets' if self.presets else self.devices or DEVICES)}"

    def asked(self) -> Experiment:
        """The experiment; against nanoGPT its own, unchanged. Raises ExperimentError."""
        check_output("--output", self.output)
        if self.devices is not None and self.devices < 1:
            raise ExperimentError(f"--devices {self.devices} must be at least 1")
        if not self.against:
            return super().asked()
        sections = tuple(f"{name}." for name in Experiment.__struct_fields__)
        given = [flag for flag in sorted(self.given) if flag.startswith(sections)]
        given += [flag for flag in ("variants", "init_from") if getattr(self, flag)]
        if given or self.experiment not in (self.default, GOLDEN):
            flag = f"--{given[0]}" if given else self.experiment
            raise ExperimentError(f"{flag} has no effect: nanoGPT was run on the experiment {GOLDEN}")
        return load(GOLDEN)

    def cases(self, experiment: Experiment) -> Grid:
        """Each case, its reference before it. Raises ExperimentError."""
        engines, presets = (
            chosen_engines(self.engines),
            several_presets(self.presets, experiment.model, self.devices),
        )
        if self.variants and not presets:
            raise ExperimentError("--variants has no effect without --presets")
        if self.against:
            return against_nanogpt(experiment, engines, presets)
        if not presets:
            return rungs_of_engines(experiment, engines, self.devices or DEVICES)
        variants = VARIANTS if self.variants == ("all",) else self.variants
        rows, refused = varied(experiment, presets, variants, skips=self.presets == ("all",))
        cases, left_out = against_one_device(engines, rows, as_presets=True)
        whole_rows = {f"{engine}.{row}": why for engine in engines for row, why in refused.items()}
        return cases, left_out | whole_rows

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A grid: a row for each layout and setting, a column for each engine."""
        verdicts = {verdict.candidate: verdict for verdict in outcome.verdicts}
        dtype = outcome.experiment.precision.dtype
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
                pivot(f"{ERRORS}, {dtype}", outcome, lambda name: cell_of(outcome, name, verdicts.get(name)))
            ],
            passed=outcome.passed and not skipped,
        )

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """Write as Markdown what --output asks for."""
        if self.output:
            versions = ", ".join(map(" ".join, outcome.circumstances.versions.items()))
            head = f"# Parity\n\nWritten by `{outcome.line}`, not by hand. {versions}.\n\n{PAGE}\n\n"
            text = f"{head}{markdown(self.findings(outcome, folder))}\n"
            write_atomically(self.output, text.encode())
        return outcome


def rungs_of_engines(experiment: Experiment, engines: Iterable[str], devices: int) -> Grid:
    """The unsharded reference, then every engine on one device and with each gradient synchronisation."""
    single = spread(experiment, "single")
    cases, left_out = against_one_device(engines, {"1": single})
    for name in engines:
        engine = ENGINES[name]
        for sync in engine.gradient_sync if devices > 1 else ():
            chosen = sync if engine.offers_choice else experiment.layout.gradient_sync
            layout = {"dp_replicate": devices, "gradient_sync": chosen}
            sharded = revalidate(edited(single, {"layout": layout}))
            more, out = grid([name], {f"{devices}-{sync}": sharded}, against="reference", ladder=True)
            cases, left_out = cases | more, left_out | out
    return cases, left_out


def against_nanogpt(experiment: Experiment, engines: list[str], presets: dict[str, int]) -> Grid:
    """Each engine and layout by AdamW and by SGD."""
    rows = {}
    for name, spec in {"": experiment, "sgd": revalidate(edited(experiment, {"optimizer": SGD}))}.items():
        layouts = {preset: spread(spec, preset, devices) for preset, devices in presets.items()}
        for preset, laid_out in (layouts or {"": spec}).items():
            rows[".".join(filter(None, (preset, name)))] = laid_out
    later_step = experiment.train.max_iters
    return grid(engines, rows, against=NANOGPT, ladder=True, later_step=later_step)


def cell_of(outcome: Outcome, name: str, verdict: Verdict | None) -> Text:
    """A cell of the grid: errors of `SHOWN`, and a schedule that is not the preset's; or what went wrong."""
    if verdict is None:
        return Text(outcome.undone[name], news="fail")
    if not verdict.passed:
        return Text(verdict.sentence(), news="fail")
    errors = (verdict.error(rung) for rung in SHOWN)
    text = " / ".join("?" if error is None else f"{error:.0e}" for error in errors)
    is_other = outcome.cases[name].experiment.layout.schedule == "gpipe" and "pp_gpipe" not in name
    return Text(f"{text} (gpipe)" if is_other else text)
