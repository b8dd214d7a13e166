"""`shardpair memory`: what a device holds at the peak of a step, by class, in every engine and layout."""

import itertools
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.contract.memory_profile import CLASSES, Peak
from compare.contract.record import Record
from compare.flags.arguments import StudiedName, chosen_engines
from compare.judge.closed_forms.peak_memory import peak_form
from compare.judge.outcome import Case, Grid, Outcome
from compare.present.memory import UNEXPLAINED, AtPeak, at_peak, rows
from compare.show.findings import NONE, Column, Findings, Text, table_of
from compare.spec.experiment import Experiment, edited
from compare.studies.bench_cases import edits_of
from compare.studies.presets import PRESETS, check_names, spread
from compare.study import OF_LAYOUTS, Study, findings_of, grid, pivot
from compare.terminal import human_bytes

LAYOUTS = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp", "tp", "tp_sp"),
    *("ddp_tp", "fsdp_tp", "fsdp_tp_sp", "pp", "pp_gpipe"),
)


class Held(Struct, frozen=True, kw_only=True):
    """The fullest device of a case; no peak if the engine does not say what it holds."""

    device: int = 0
    peak: list[Peak] = []


class Memory(Study, frozen=True, kw_only=True):
    """Train under one layout after the other, and show what the fullest device holds at its peak, by class.

    The figures are the records' own; the closed form of each class stands beside them on the page.

    Try:
      shardpair memory demo --presets ddp fsdp tp
      shardpair memory demo --presets single --variants layout.remat=full train.loss_chunks=4
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines; one that cannot express a layout is left out of it. Default: all of the grid."""
    presets: tuple[str, ...] = LAYOUTS
    """Layouts by name, on 2 devices, or 4 where they have two axes."""
    variants: tuple[str, ...] = ()
    """Settings that save memory, each in a row beside the layout as it is: such as layout.remat=full."""

    brief = "bytes at the peak of a step, by class, engine and layout"
    fixed: ClassVar = {**OF_LAYOUTS, "init_from": None, "train.max_iters": 3}

    def cases(self, experiment: Experiment) -> Grid:
        """Each layout and setting on every engine that can express it."""
        check_names("--presets", "preset", self.presets, PRESETS)
        spread_over = {
            ", ".join(filter(None, (name, variant))): spread(
                edited(experiment, edits_of(variant) if variant else {}), name, devices_of(name)
            )
            for name, variant in itertools.product(self.presets, ("", *self.variants))
        }
        return grid(chosen_engines(self.engines), spread_over)

    def keep(self, case: Case, record: Record) -> Held:
        """The fullest device."""
        found = at_peak(record)
        return Held(device=found.device, peak=[found.peak]) if found else Held()

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Sums of all classes, a row for each layout; and each class beside its closed form."""
        peaks = peaks_of(outcome)
        by_class = [
            (outcome.cases[name].row, outcome.cases[name].engine, cells[1:])
            for name, one in peaks.items()
            for cells in rows([("", one)])
        ]
        classes = [Column("layout", lambda row: row[0]), Column("engine", lambda row: row[1])]
        for place, kind in enumerate((*CLASSES, "all")):
            classes.append(Column(kind, lambda row, place=place: row[2][place]))
        odd = sum(UNEXPLAINED in cell for *_, cells in by_class for cell in cells)

        def total(name: str) -> Text:
            return Text(human_bytes(peaks[name].peak.total) if name in peaks else NONE)

        return findings_of(
            outcome,
            title=f"Peak memory of a device: {outcome.name}",
            sentence=f"{len(peaks)} peaks; classes that are not as their closed form says: {odd}",
            tables=[pivot("Bytes of the fullest device at its peak", outcome, total)],
            details=[table_of("By class: measured, of the closed form", classes, by_class)],
            rows={name: one.peak for name, one in peaks.items()},
        )


def devices_of(preset: str) -> int:
    """As few as it can be spread over."""
    return 1 if preset == "single" else 2 * PRESETS[preset].fixed


def peaks_of(outcome: Outcome) -> dict[str, AtPeak]:
    """Every measured peak beside its closed form, by case."""
    return {
        name: AtPeak(
            device=held.device,
            peak=held.peak[0],
            form=peak_form(outcome.cases[name].engine, outcome.cases[name].experiment, device=held.device),
        )
        for name, held in outcome.values(Held).items()
        if held.peak
    }
