"""`shardpair bench`: which engine is faster on this machine, by how much, and how surely."""

import itertools
from pathlib import Path

from msgspec.structs import replace

from compare.commands.bench.outcome import BenchRow, blocks, timed
from compare.commands.bench.timed_study import Timed, timed_findings
from compare.commands.bench.words import block_title, in_one_line, sentences
from compare.flags import DEVICES, EngineName
from compare.judge.outcome import Case, Grid, Outcome
from compare.setup.fitting import as_preset
from compare.setup.presets import PRESETS, check_names, check_presets, edits_of, preset_layout
from compare.show.findings import Column, Findings, table_of
from compare.spec.axes import AXES
from compare.spec.engines.registry import ENGINES, REFERENCE, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, revalidate
from compare.terminal import human_bytes


class Bench(Timed, frozen=True, kw_only=True):
    """Time engines, layouts, sizes and settings against each other, and say how sure the ratios are.

    Each case is a fresh process, or the ranks that it starts; all of them run in rounds, whose order rotates.
    Steps run in windows: nothing waits for a step inside of one. A ratio is taken within a round; the median
    over rounds has an interval from five rounds on. Loss and gradient norm of every step are held against the
    first case's; `shardpair check` proves more. On a busy machine it refuses to begin.

    Try:
      shardpair bench demo --rounds 2
      shardpair bench cpu --presets ddp zero1 fsdp --devices 2 --baseline torch-library
      shardpair bench cpu --engines torch-manual --presets ddp --devices 2 --variants layout.bucket_mb=1
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all. One that is named twice is held against itself. A peer
    (`shardpair list`) runs if it is named, and is left out, with the line that installs it, where missing."""
    presets: tuple[str, ...] = ()
    """Layouts by name (`shardpair list`), a block of the table each. Default: the experiment's own layout."""
    devices: tuple[int, ...] = ()
    """How many devices each preset spreads over, one number or several. Default: 4."""
    sizes: tuple[str, ...] = ()
    """Sizes of the work, a block of the table each: fields of the experiment, such as train.batch_size=8 or
    model.n_layer=12,model.n_embd=768."""
    variants: tuple[str, ...] = ()
    """Settings for the same work, a row beside each engine's own: such as layout.bucket_mb=1 or
    layout.remat=full."""
    baseline: str = ""
    """What the others are divided by: an engine, in each block its own case; or ENGINE.LAYOUT, such as
    jax-compiler.single, one case for all blocks of its size. Default: torch-manual, or the first engine."""
    cache_dir: str = ""
    """Keep compiled programs here between processes, to save time. Default: compile anew, and time it."""

    brief = "which engine, layout or setting is faster, and how surely"

    def cases(self, experiment: Experiment) -> Grid:
        """Engines x layouts x sizes x variants, as far as engines can express them."""
        if self.devices and not self.presets:
            raise ExperimentError(
                f"--devices {self.devices[0]} without --presets has no effect: say how they are used, with "
                f"--presets or with the layout's degrees, such as --layout.dp_replicate {self.devices[0]}"
            )
        engines = self.engines or tuple(STUDIED)
        for flag, texts in (("--sizes", self.sizes), ("--variants", self.variants)):
            check_names(flag, "setting", texts, texts)
            for text in texts:
                edits = edits_of(text)
                degrees = edits.get("layout", {}).keys() & set(AXES) if self.presets else ()
                if degrees:
                    why = f"layout.{min(degrees)} contradicts --presets {self.presets[0]}"
                    raise ExperimentError(f"{flag} {text}: {why}, which gives the degrees: give one of them")
                if "max_iters" in edits.get("train", {}):
                    raise ExperimentError(f"{flag} {text}: the steps of a bench are those of --window")
        layouts, left_out = self._layouts(experiment.layout)
        experiment = edited(experiment, {"train": {"max_iters": self.timing.steps}})
        cases: dict[str, Case] = {}
        choices = itertools.product(layouts.items(), self.sizes or ("",), ("", *self.variants))
        for (name, layout), size, variant in choices:
            try:
                plain = revalidate(edited(replace(experiment, layout=layout), edits_of(size)))
                spec = revalidate(edited(plain, edits_of(variant)))
            except ExperimentError as error:
                left_out[" ".join(filter(None, (name, size, variant)))] = str(error)
                continue
            for place, engine in enumerate(engines, 1):
                copy = engines[:place].count(engine)
                case = self.case(engine, spec, layout=name, size=size, variant=variant, copy=copy)
                if why := _refusal(case, plain, is_preset=bool(self.presets)):
                    left_out[case.name] = why
                else:
                    cases[case.name] = case
        return cases, left_out

    def planned(self) -> Outcome:
        """The bench with its baseline. Raises ExperimentError."""
        planned = super().planned()
        engines = [case.engine for case in planned.cases.values()]
        if why := planned.left_out.get(self.baseline):
            raise ExperimentError(f"--baseline {self.baseline}: {why}")
        baseline = self.baseline or (REFERENCE if REFERENCE in engines else engines[0])
        planned = replace(planned, more={**planned.more, "baseline": baseline})
        if self.baseline and not any(map(timed(planned).baseline_of, planned.cases.values())):
            there = dict.fromkeys(f"{case.engine}.{case.layout}" for case in planned.cases.values())
            raise ExperimentError(
                f"--baseline {baseline}: no such case; give an engine that is timed, or one with its layout "
                f"(there are {', '.join(there)})"
            )
        return planned

    def _layouts(self, own: Layout) -> tuple[dict[str, Layout], dict[str, str]]:
        """Layouts by name; and presets that cannot spread over so many devices, with the reason."""
        if not self.presets:
            degrees = [f"{axis}{own.axes[axis]}" for axis in AXES if own.axes[axis] > 1]
            return {"-".join(degrees) or "single": own}, {}
        check_names("--presets", "preset", self.presets, PRESETS)
        pairs = list(itertools.product(self.presets, self.devices or (DEVICES,)))
        layouts, left_out = {}, {}
        for preset, count in pairs:
            try:
                layout = preset_layout(own, preset, count, self.said)
                layouts[f"{preset}-{layout.devices}" if layout.devices > 1 else preset] = layout
            except ExperimentError as error:
                left_out[f"{preset}-{count}"] = str(error)
        check_presets("--presets", own, pairs, self.said)
        return layouts, left_out

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each block, the ratios with their intervals, and what goes before the steps."""
        view = timed(outcome)
        by_block = blocks(view)
        return timed_findings(
            view,
            title=f"{outcome.name}: {len(outcome.cases)} cases timed",
            sentence=in_one_line(view),
            about=sentences(view),
            tables=[
                table_of(block_title(view, block), COLUMNS, of_block) for block, of_block in by_block.items()
            ],
            rows=by_block,
        )


COLUMNS = (
    Column[BenchRow]("engine", lambda row: row.label),
    Column[BenchRow]("wall ms", lambda row: row.wall_ms, ".1f"),
    Column[BenchRow]("ratio", lambda row: row.wall_ratio, ".2f"),
    Column[BenchRow]("CPU ms", lambda row: row.cpu_ms, ".1f"),
    Column[BenchRow]("CPU ratio", lambda row: row.cpu_ratio, ".2f"),
    Column[BenchRow]("single ms", lambda row: row.single_ms, ".1f"),
    Column[BenchRow]("tokens/s", lambda row: row.tokens_per_s, ",.0f"),
    Column[BenchRow]("GFLOP/s", lambda row: row.flops_per_s / 1e9, ",.3g"),
    Column[BenchRow]("of ceiling", lambda row: row.of_ceiling, ".0%"),
    Column[BenchRow]("MFU", lambda row: row.mfu, ".0%"),
    Column[BenchRow]("compile s", lambda row: row.compile_s, ".2f"),
    Column[BenchRow]("first s", lambda row: row.first_step_s, ".2f"),
    Column[BenchRow]("start s", lambda row: row.start_up_s, ".1f"),
    Column[BenchRow]("memory", lambda row: row.peak_mem_bytes, human_bytes),
)


def _refusal(case: Case, plain: Experiment, *, is_preset: bool) -> str:
    """Why an engine cannot do a case, or does it as it does another one; '' if it can."""
    engine, spec = ENGINES[case.engine], case.experiment
    try:
        if is_preset and not case.variant:
            as_preset(case.engine, spec)
        engine.require_experiment(spec)
    except ExperimentError as error:
        return str(error)
    chosen = {"layout": {"gradient_sync": plain.layout.gradient_sync}}
    if case.variant and not engine.offers_choice and edited(spec, chosen) == plain:
        return f"it has no effect: {case.engine} chooses its gradient synchronisation itself"
    return ""
