"""`shardpair memory`: what a device holds at the peak of a step, by class, in every engine and layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.contract.memory_profile import CLASSES, Peak
from compare.contract.record import Record
from compare.flags.arguments import StudiedName
from compare.judge.closed_forms.peak_memory import peak_form
from compare.judge.comparison import Comparison
from compare.judge.outcome import PartsOutcome
from compare.present.memory_tables import UNEXPLAINED, AtPeak, at_peak, rows
from compare.show.findings import Column, Findings, table_of
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, edited
from compare.studies.cases import engine_cases, why_not
from compare.studies.presets import check_names, spread
from compare.survey import Part, Parts, Survey, survey_findings
from compare.terminal import human_bytes

STEPS = 3
LAYOUTS = {
    "single": 1,
    **dict.fromkeys(("ddp", "zero1", "zero2", "fsdp", "shard_grad_op"), 2),
    "hsdp": 4,
    **dict.fromkeys(("tp", "tp_sp"), 2),
    **dict.fromkeys(("ddp_tp", "fsdp_tp", "fsdp_tp_sp"), 4),
    **dict.fromkeys(("pp", "pp_gpipe"), 2),
}
"""Presets, and their devices."""


class Held(Struct, frozen=True, kw_only=True):
    """The fullest device of one engine under one layout."""

    device: int
    peak: Peak


Row = tuple[str, dict[str, Held]]
"""A layout, and what each engine's fullest device held."""


class Memory(Survey[dict[str, Held]], frozen=True, kw_only=True):
    """Train under one layout after the other, and show what the fullest device holds at its peak, by class.

    The figures are the records' own; the closed form of each class stands beside them on the page.

    Try:
      shardpair memory demo --presets ddp fsdp tp
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines; one that cannot express a layout is left out of it. Default: all of the grid."""
    presets: tuple[str, ...] = ()
    """Layouts by name, on 2 or 4 devices. Default: 14 of them."""

    brief = "bytes at the peak of a step, by class, engine and layout"
    own_layouts = "the study has layouts of its own: --presets"
    decided: ClassVar = {"train.max_iters": f"the study, which needs {STEPS} steps"}
    kept: ClassVar = PartsOutcome[dict[str, Held]]

    def parts(self, experiment: Experiment) -> Parts:
        """A part for each layout: every engine that can express it."""
        check_names("--presets", "preset", self.presets, LAYOUTS)
        short, parts, left_out = edited(experiment, {"train": {"max_iters": STEPS}}), [], {}
        for preset in self.presets or LAYOUTS:
            spec = spread(short, preset, LAYOUTS[preset])
            whys = {name: why_not(name, spec, self.platform) for name in self.engines or STUDIED}
            left_out |= {f"{name} under {preset}": why for name, why in whys.items() if why}
            if able := [name for name, why in whys.items() if not why]:
                parts.append(Part(name=preset, cases=engine_cases(spec, able)))
        return parts, left_out

    def result(self, comparison: Comparison, records: Mapping[str, Record]) -> dict[str, Held]:
        """The fullest device of every engine that says what it holds."""
        found = {name: at_peak(record) for name, record in records.items()}
        return {name: Held(device=one.device, peak=one.peak) for name, one in found.items() if one}

    @classmethod
    def findings(cls, outcome: PartsOutcome[dict[str, Held]], folder: Path) -> Findings:
        """Sums of all classes, a row for each layout; and each class beside its closed form."""
        found: list[Row] = list(outcome.results.items())
        engines = list(dict.fromkeys(engine for _, held in found for engine in held))
        sums = [Column[Row]("peak of a device", lambda row: row[0]), *map(_sum_of, engines)]
        by_class = [
            (preset, engine, cells[1:])
            for (preset, engine), one in peaks_of(outcome).items()
            for cells in rows([("", one)])
        ]
        classes = [Column("layout", lambda row: row[0]), Column("engine", lambda row: row[1])]
        for place, kind in enumerate((*CLASSES, "all")):
            classes.append(Column(kind, lambda row, place=place: row[2][place]))
        odd = sum(UNEXPLAINED in cell for *_, cells in by_class for cell in cells)
        return survey_findings(
            outcome,
            title=f"Peak memory of a device under {len(found)} layouts",
            sentence=f"{len(by_class)} peaks; classes that are not as their closed form says: {odd}",
            tables=[table_of("Bytes of the fullest device at its peak", sums, found)],
            details=[table_of("By class: measured, of the closed form", classes, by_class)],
            rows=outcome.results,
        )


def peaks_of(outcome: PartsOutcome[dict[str, Held]]) -> dict[tuple[str, str], AtPeak]:
    """Every measured peak beside its closed form, by layout and engine."""
    specs = {name: part.cases[0].experiment for name, part in Memory.parts_of(outcome).items()}
    return {
        (preset, engine): AtPeak(
            device=held.device,
            peak=held.peak,
            form=peak_form(engine, specs[preset], device=held.device),
        )
        for preset, by_engine in outcome.results.items()
        for engine, held in by_engine.items()
    }


def _sum_of(engine: str) -> Column[Row]:
    return Column[Row](
        engine, lambda row: row[1][engine].peak.total if engine in row[1] else None, human_bytes
    )
