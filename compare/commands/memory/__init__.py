"""`shardpair memory`: what a device holds at the peak of a step, by class, in every engine and layout."""

from pathlib import Path
from typing import ClassVar

from compare.contract.memory_profile import CLASSES, Peak
from compare.contract.record import Record
from compare.flags import PresetNames, StudiedName, chosen_engines
from compare.judge.outcome import Case, Grid, Outcome
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.grid import grid, pivot, varied
from compare.setup.presets import PRESETS, check_names
from compare.show.findings import NONE, Column, Findings, Text, findings_of, table_of
from compare.spec.experiment import Experiment
from compare.terminal import human_bytes
from compare.theory.peak import peak_per_device

LAYOUTS = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp", "tp", "tp_sp"),
    *("ddp_tp", "fsdp_tp", "fsdp_tp_sp", "pp", "pp_gpipe"),
)


class Memory(Study, frozen=True, kw_only=True):
    """Train under several layouts, and show the memory of the fullest device at its peak, by class.

    The table also has the estimate. Each layout runs on 2 devices, or 4 if it has two axes.

    Try:
      shardpair memory demo --presets ddp fsdp tp
      shardpair memory demo --presets single --variants layout.remat=full train.loss_chunks=4
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to train; a layout skips engines that cannot express it. Default: all."""
    presets: PresetNames = LAYOUTS
    variants: tuple[str, ...] = ()
    """Settings that save memory, one more row each, such as layout.remat=full."""

    brief = "bytes at the peak of a step, by class, engine and layout"
    fixed: ClassVar = {**OF_LAYOUTS, "init_from": None, "train.max_iters": 3}

    def cases(self, experiment: Experiment) -> Grid:
        """Each layout and setting on every engine that can express it, on 2 devices, or 4 with two axes."""
        check_names("--presets", "preset", self.presets, PRESETS)
        presets = {name: 1 if name == "single" else 2 * PRESETS[name].fixed for name in self.presets}
        rows, _ = varied(experiment, presets, self.variants)
        return grid(chosen_engines(self.engines), rows)

    def keep(self, case: Case, record: Record, *, first_step_after_s: float) -> Peak:
        """The peak of the fullest device; no bytes if the engine recorded none."""
        memory = record.memory
        return memory.devices[memory.fullest].peak if memory and memory.devices else Peak(bytes={})

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Sums of all classes, a row for each layout; and a table of classes with the estimate."""
        peaks = {name: peak for name, peak in outcome.values(Peak).items() if peak.bytes}

        def total(name: str) -> Text:
            return Text(human_bytes(peaks[name].total) if name in peaks else NONE)

        def estimated(name: str) -> float:
            case = outcome.cases[name]
            return max(peak_per_device(case.engine, case.experiment))

        columns: list[Column[str]] = [
            Column("layout", lambda name: outcome.cases[name].row),
            Column("engine", lambda name: outcome.cases[name].engine),
            *(
                Column(kind, lambda name, kind=kind: peaks[name].bytes.get(kind) or None, human_bytes)
                for kind in CLASSES
            ),
            Column("all", lambda name: peaks[name].total, human_bytes),
            Column("estimated", estimated, human_bytes),
        ]
        return findings_of(
            outcome,
            title=f"Peak memory of a device: {outcome.name}",
            sentence=f"{len(peaks)} peaks",
            tables=[
                pivot("Bytes of the fullest device at its peak", outcome, total),
                table_of("By class", columns, list(peaks), words=1),
            ],
            rows=peaks,
        )
