"""`shardpair bench`: which engine is faster on this machine, by how much, and how surely."""

import itertools
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from compare.commands.bench.agreement import find_disagreements
from compare.commands.bench.outcome import BenchRow, Measurement, measure, read_timings, rows_by_block
from compare.commands.bench.words import (
    block_title,
    describe_timing,
    summarize,
    warn_of_changes,
)
from compare.contract.record import Record
from compare.contract.request import Request
from compare.contract.timing import Timing
from compare.execute import cpu_load
from compare.execute.launch import EngineError
from compare.flags import DEVICES, EngineName, PresetNames
from compare.judge.outcome import Case, Grid, Outcome
from compare.run.study import Study
from compare.setup.effects import like_plain
from compare.setup.fitting import as_preset
from compare.setup.presets import PRESETS, check_names, check_presets, check_settings, edits_of, preset_layout
from compare.show.findings import Column, Findings, findings_of, table_of
from compare.spec.axes import AXES
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited, revalidate
from compare.text import human_bytes

STANDARD = Timing()


class Bench(Study, frozen=True, kw_only=True):
    """Time engines, layouts, sizes and settings against each other, with intervals for their ratios.

    Each case is a fresh process, or the ranks that it starts. All cases run in rounds, in an order that
    rotates. Steps run in windows, in which nothing waits for a step. A ratio is taken within a round; the
    median over rounds has an interval from five rounds on. Loss and gradient norm of every step are compared
    with those of the first case; `shardpair check` proves more. A busy machine is refused.

    Try:
      shardpair bench demo --rounds 2
      shardpair bench cpu --presets ddp zero1 fsdp --devices 2 --baseline torch-library
      shardpair bench cpu --engines torch-manual --presets ddp --devices 2 --variants layout.bucket_mb=1
    """

    engines: tuple[EngineName, ...] = ()
    """Engines. Default: all. An engine that is named twice is compared with itself. A peer runs only if
    named; a missing peer is skipped, and its install command printed."""
    presets: PresetNames = ()
    devices: tuple[int, ...] = ()
    """Numbers of devices for each preset. Default: 4."""
    sizes: tuple[str, ...] = ()
    """Sizes of the work, one block of the table each: fields of the experiment, such as train.batch_size=8 or
    model.n_layer=12,model.n_embd=768."""
    variants: tuple[str, ...] = ()
    """Settings for the same work, one row each after the engine's default, such as layout.bucket_mb=1 or
    layout.remat=full."""
    baseline: str = ""
    """The denominator of the ratios: an engine, in each block its own case; or ENGINE.LAYOUT, such as
    jax-compiler.single, one case for all blocks of its size. Default: torch-manual, or the first engine."""
    rounds: int = 5
    """Number of rounds. Fewer than five give no interval."""
    window: int = STANDARD.window
    """Steps of a window, in which nothing waits for the devices."""
    windows: int = STANDARD.windows
    """Windows of a process."""
    anyway: bool = False
    """Time on a busy machine, too. The page then has a warning."""
    cache_dir: str = ""
    """Folder for compiled programs between processes, to save time. Default: compile in each process, and
    time it."""

    fixed: ClassVar = {
        "train.max_iters": None,
        "init_from": None,
        "train.eval_interval": 0,
        "checkpoint.every": 0,
    }
    needs: ClassVar = {**Study.needs, "devices": "presets"}

    @property
    def timing(self) -> Timing:
        """Steps of a process."""
        return Timing(window=self.window, windows=self.windows)

    def cases(self, experiment: Experiment) -> Grid:
        """Engines x layouts x sizes x variants, without those that an engine cannot express."""
        for flag in ("rounds", "window", "windows"):
            if (count := getattr(self, flag)) < 1:
                raise ExperimentError(f"--{flag} {count}: give 1 or more")
        engines = self.engines or tuple(STUDIED)
        for flag, texts in (("--sizes", self.sizes), ("--variants", self.variants)):
            check_settings(flag, texts, experiment, self.presets)
            for text in texts:
                if "max_iters" in edits_of(text).get("train", {}):
                    raise ExperimentError(f"{flag} {text}: --window sets the steps of a bench")
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
            for number, engine in enumerate(engines, 1):
                copy = engines[:number].count(engine)
                request = Request(engine=engine, experiment=spec, timing=self.timing, platform=self.platform)
                place = {
                    "layout": name,
                    "size": size,
                    "variant": variant,
                    "copy": str(copy) if copy > 1 else "",
                }
                case = Case(
                    request=request, coordinates={key: value for key, value in place.items() if value}
                )
                if why := _refusal(case, plain, is_preset=bool(self.presets)):
                    left_out[case.name] = why
                else:
                    cases[case.name] = case
        for name, why in like_plain(cases.values()).items():
            left_out[name] = why
            del cases[name]
        if why := left_out.get(self.baseline):
            raise ExperimentError(f"--baseline {self.baseline}: {why}")
        names = dict.fromkeys(f"{case.engine}.{case.coordinates['layout']}" for case in cases.values())
        if self.baseline and self.baseline not in {*names, *(case.engine for case in cases.values())}:
            raise ExperimentError(
                f"--baseline {self.baseline}: no such case; give an engine that is timed, or one with its "
                f"layout (there are {', '.join(names)})"
            )
        return cases, left_out

    def begin(self, outcome: Outcome) -> Outcome:
        """The outcome as it is. Raises EnvironmentMissing: a busy machine."""
        cpu_load.require_idle(cpu_load.busy_cores(), anyway=self.anyway)
        return outcome

    def keep(self, case: Case, record: Record, *, first_step_after_s: float) -> Measurement:
        """The figures of one process. Raises EngineError: it did not time all windows."""
        timing, windows = self.timing, len(record.manifest.windows)
        if windows != timing.windows:
            raise EngineError(f"{case.name}: it timed {windows} of {timing.windows} windows", exit_code=1)
        return measure(record, first_step_after_s=first_step_after_s, timing=timing)

    def _layouts(self, own: Layout) -> tuple[dict[str, Layout], dict[str, str]]:
        """Layouts by name; and presets that cannot use this number of devices, with the reason."""
        if not self.presets:
            degrees = [f"{axis}{own.axes[axis]}" for axis in AXES if own.axes[axis] > 1]
            return {"-".join(degrees) or "single": own}, {}
        check_names("--presets", "preset", self.presets, PRESETS)
        for count in self.devices:
            if count < 1 or self.devices.count(count) > 1:
                raise ExperimentError(f"--devices {count}: give numbers from 1 on, each once")
        pairs = list(itertools.product(self.presets, self.devices or (DEVICES,)))
        layouts, left_out = {}, {}
        for preset, count in pairs:
            try:
                layout = preset_layout(own, preset, count, self.layout_flags)
                layouts[f"{preset}-{layout.devices}" if layout.devices > 1 else preset] = layout
            except ExperimentError as error:
                left_out[f"{preset}-{count}"] = str(error)
        check_presets(own, pairs, self.layout_flags)
        return layouts, left_out

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each block: times, ratios with their intervals, start and compilation."""
        view = read_timings(outcome)
        by_block, mistakes = rows_by_block(view), [*find_disagreements(view), *warn_of_changes(view)]
        rows = [row for of_block in by_block.values() for row in of_block]
        of_load = cpu_load.warn_of_load(view)
        return findings_of(
            view,
            title=f"{outcome.name}: {len(outcome.cases)} cases timed",
            sentence="UNRELIABLE (busy machine): " * bool(of_load) + summarize(view, rows),
            is_doubtful=bool(of_load),
            about=describe_timing(view, rows),
            tables=[
                table_of(block_title(view, block), COLUMNS, of_block) for block, of_block in by_block.items()
            ],
            values={"rows": by_block},
            passed=not mistakes,
            warnings=[*of_load, *mistakes],
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
    Column[BenchRow]("MFU", lambda row: row.mfu, ".0%"),
    Column[BenchRow]("compile s", lambda row: row.compile_s, ".2f"),
    Column[BenchRow]("first s", lambda row: row.first_step_s, ".2f"),
    Column[BenchRow]("start s", lambda row: row.start_up_s, ".1f"),
    Column[BenchRow]("memory", lambda row: row.peak_mem_bytes, human_bytes),
)


def _refusal(case: Case, plain: Experiment, *, is_preset: bool) -> str:
    """The reason why an engine cannot run a case, or runs it like its plain case; '' if it can."""
    engine, spec = ENGINES[case.engine], case.experiment
    has_variant = "variant" in case.coordinates
    try:
        if is_preset and not has_variant:
            as_preset(case.engine, spec)
    except ExperimentError as error:
        return str(error)
    if why := engine.why_not_train(spec):
        return why
    chosen = {"layout": {"gradient_sync": plain.layout.gradient_sync}}
    if has_variant and not engine.offers_choice and edited(spec, chosen) == plain:
        return f"it has no effect: {case.engine} chooses its gradient synchronisation itself"
    return ""
