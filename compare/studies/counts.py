"""`shardpair counts`: how often the collectives of a step ran, by the profiler, against the ledger."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.contract.record import Record
from compare.flags.arguments import StudiedName
from compare.host.tensors import RecordError
from compare.judge.comparison import Comparison
from compare.judge.outcome import PartsOutcome
from compare.show.findings import Column, Findings, table_of
from compare.spec.engines.jax import JAX
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, edited
from compare.studies.matrix_cells import LAYOUTS, matrix_cases
from compare.survey import Part, Parts, Survey, survey_findings

ENGINES = tuple(name for name, engine in STUDIED.items() if engine.side == JAX.name)
SIZES = {
    "model": {"n_layer": 4, "n_head": 4, "n_embd": 16, "block_size": 8},
    "train": {"max_iters": 2, "batch_size": 8, "gradient_accumulation_steps": 2},
    "layout": {"bucket_mb": 25.0},
}


class CountedKind(Struct, frozen=True, kw_only=True):
    """Collectives of a kind, axis and purpose in one step: a number for each device, in the mesh's order."""

    kind: str
    axis: str
    purpose: str
    static: list[int]
    """Calls, by the ledger."""
    dynamic: list[int]
    """What the profiler saw."""


class Counts(Survey[list[CountedKind]], frozen=True, kw_only=True):
    """Count the collectives of a step as they run, on every device, and hold the ledger to it.

    The ledger of a JAX engine is read from the text of the compiled step: what loops and branches make of an
    instruction is worked out. Here the step runs, and the profiler counts.

    Try:
      shardpair counts --presets fsdp_pp
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines. Default: those of JAX."""
    presets: tuple[str, ...] = ()
    """Layouts by name. Default: all that the engines can express."""

    brief = "collectives as they run, device by device, against the ledger"
    group = "Prove"
    default = "check"
    own_layouts = "every layout is a part of the study: --presets"
    decided: ClassVar = {
        f"{section}.{name}": "the study: a model of a second is enough"
        for section, fields in SIZES.items()
        for name in fields
    }
    asks: ClassVar = {"ladder": False, "profile": True}
    kept: ClassVar = PartsOutcome[list[CountedKind]]

    def parts(self, experiment: Experiment) -> Parts:
        """A part for each cell of the parity matrix."""
        small, presets = edited(experiment, SIZES), list(self.presets or ("single", *LAYOUTS))
        cases, cells = matrix_cases(small, list(self.engines or ENGINES), presets, flag="--presets")
        refused = {f"{one.engine}.{one.layout}": one.refusal for one in cells.values() if one.refusal}
        return [Part(name=case.name, cases=[case]) for case in cases[1:]], refused

    def result(self, comparison: Comparison, records: Mapping[str, Record]) -> list[CountedKind]:
        """What is in the ledger, and in the timeline."""
        (record,) = records.values()
        return counted(record)

    @classmethod
    def findings(cls, outcome: PartsOutcome[list[CountedKind]], folder: Path) -> Findings:
        """How many layouts agree, and every row of those that do not."""
        found = outcome.results
        agree = sum(all(row.static == row.dynamic for row in rows) for rows in found.values())
        every = [row for rows in found.values() for row in rows]
        calls = sum(sum(row.dynamic) for row in every)
        wrong = [(name, row) for name, rows in found.items() for row in rows if row.static != row.dynamic]
        return survey_findings(
            outcome,
            title="Collectives as they ran",
            sentence=f"{agree} of {len(found)} layouts agree: {len(every)} rows, {calls:,} calls on all "
            f"devices",
            tables=[table_of("Calls on each device that differ", COLUMNS, wrong)] if wrong else [],
            rows=found,
            passed=not wrong,
        )


COLUMNS = (
    Column[tuple[str, CountedKind]]("engine and layout", lambda row: row[0]),
    Column[tuple[str, CountedKind]]("kind", lambda row: row[1].kind),
    Column[tuple[str, CountedKind]]("axis", lambda row: row[1].axis),
    Column[tuple[str, CountedKind]]("purpose", lambda row: row[1].purpose),
    Column[tuple[str, CountedKind]]("ledger", lambda row: " ".join(map(str, row[1].static))),
    Column[tuple[str, CountedKind]]("ran", lambda row: " ".join(map(str, row[1].dynamic))),
)


def counted(record: Record) -> list[CountedKind]:
    """A row for each kind, axis and purpose of a watched run. Raises RecordError: it was not watched."""
    if record.timeline is None:
        raise RecordError(f"{record.folder} has no timeline")
    layout = record.manifest.experiment.layout
    static: dict[tuple[str, str, str], Counter[int]] = {}
    for row in record.ledger.rows:
        static.setdefault((row.kind, row.axis, row.purpose), Counter())[row.stage] += row.calls
    ran = {
        lane.device: Counter((span.operation, span.axis, span.purpose) for span in lane.spans)
        for lane in record.timeline.lanes
    }
    stages = [layout.stage_of(device) for device in range(layout.devices)]
    seen = {key for of_device in ran.values() for key in of_device if key[0]}
    return [
        CountedKind(
            kind=key[0],
            axis=key[1],
            purpose=key[2],
            static=[static.get(key, Counter())[stage] for stage in stages],
            dynamic=[ran[device][key] for device in range(layout.devices)],
        )
        for key in sorted(static.keys() | seen)
    ]
