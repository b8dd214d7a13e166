"""`shardpair savings`: what of a device's memory each setting saves."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from compare.contract.record import ON_HOST, Record
from compare.flags.arguments import StudiedName
from compare.judge.comparison import Comparison
from compare.judge.outcome import PartsOutcome
from compare.show.findings import Column, Findings, table_of
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, edited
from compare.studies.cases import engine_cases, why_not
from compare.studies.presets import spread
from compare.survey import Part, Parts, Survey, survey_findings
from compare.terminal.units import human_bytes

STEPS = 3
SETTINGS: dict[str, dict[str, dict[str, object]]] = {
    "layout.remat = none": {"layout": {"remat": "none"}},
    "layout.remat = dots": {"layout": {"remat": "dots"}},
    "layout.remat = full": {"layout": {"remat": "full"}},
    "train.loss_chunks = 8, remat = full": {"layout": {"remat": "full"}, "train": {"loss_chunks": 8}},
    "layout.offload = optimizer, loss_chunks = 8, remat = full": {
        "layout": {"remat": "full", "offload": "optimizer"},
        "train": {"loss_chunks": 8},
    },
}


class Held(Struct, frozen=True, kw_only=True):
    """Bytes of one engine on one device."""

    peak: int
    """Of a step."""
    at_rest: int
    """Of parameters and optimizer state, between two steps, on the device."""
    on_host: int
    """Of the same, in the host's memory."""
    peak_method: str


Row = tuple[str, dict[str, Held]]
"""A setting, and what each engine held."""


class Savings(Survey[dict[str, Held]], frozen=True, kw_only=True):
    """Train under one setting that saves memory after the other, and show what one device holds.

    The peak of a step, and what is there between two steps, are the records' own figures.

    Try:
      shardpair savings demo --model.vocab_size 8192 --train.batch_size 8
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines. Default: all that can express every setting."""

    brief = "what of a device's memory each setting saves"
    own_layouts = "it is one device whose memory is measured"
    decided: ClassVar = {
        "layout.remat": "the settings that are measured",
        "layout.offload": "the settings that are measured",
        "train.loss_chunks": "the settings that are measured",
        "train.max_iters": f"the study, which needs {STEPS} steps",
    }
    kept: ClassVar = PartsOutcome[dict[str, Held]]

    def parts(self, experiment: Experiment) -> Parts:
        """A part for each setting: all engines on one device."""
        short = edited(experiment, {"train": {"max_iters": STEPS}})
        specs = {name: spread(edited(short, edits), "single") for name, edits in SETTINGS.items()}
        whys = {
            name: why
            for name in self.engines or STUDIED
            for spec in specs.values()
            if (why := why_not(name, spec, self.platform))
        }
        engines = [name for name in self.engines or STUDIED if name not in whys]
        return [Part(name=name, cases=engine_cases(spec, engines)) for name, spec in specs.items()], whys

    def result(self, comparison: Comparison, records: Mapping[str, Record]) -> dict[str, Held]:
        """What each engine's manifest says."""
        return {name: _held(record) for name, record in records.items()}

    @classmethod
    def findings(cls, outcome: PartsOutcome[dict[str, Held]], folder: Path) -> Findings:
        """A row for each setting: peak and bytes at rest of every engine."""
        rows: list[Row] = list(outcome.results.items())
        engines = list(rows[0][1])
        peaks = {setting: min(one.peak for one in held.values()) for setting, held in rows}
        least = min(peaks, key=peaks.__getitem__)
        columns = [
            Column[Row]("setting", lambda row: row[0]),
            *(column for name in engines for column in _columns(name)),
            Column[Row]("on the host", lambda row: max(one.on_host for one in row[1].values()), human_bytes),
        ]
        return survey_findings(
            outcome,
            title=f"What saves memory: {', '.join(engines)} on one device",
            sentence=f"the least peak is {human_bytes(peaks[least])}, with {least}",
            tables=[table_of("Peak of a step, and bytes at rest between two", columns, rows)],
            rows=outcome.results,
        )


def _held(record: Record) -> Held:
    manifest = record.manifest
    rest = {kind: sizes[0] for kind, sizes in manifest.resident_bytes.items()}
    return Held(
        peak=manifest.peak_memory_bytes[0],
        at_rest=rest["parameters"] + rest["optimizer"],
        on_host=rest.get(ON_HOST, 0),
        peak_method=manifest.peak_memory_method,
    )


def _columns(engine: str) -> list[Column[Row]]:
    return [
        Column[Row](f"{engine}: peak", lambda row: row[1][engine].peak, human_bytes),
        Column[Row](f"{engine}: at rest", lambda row: row[1][engine].at_rest, human_bytes),
    ]
