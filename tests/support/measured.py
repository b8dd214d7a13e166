"""Peaks of memory that runs measured, an oracle of the estimate: `tests/data/peaks.json`, a row a device."""

from pathlib import Path

import msgspec
from msgspec import Struct

from compare.spec.experiment import Experiment

DATA = Path(__file__).parents[1] / "data"


class MeasuredPeak(Struct, frozen=True, kw_only=True):
    """The fullest device of a run at the peak of a step; sizes in bytes."""

    engine: str
    layout: str
    """A preset, or the settings that save memory."""
    experiment: Experiment
    device: int
    bytes: dict[str, int]
    """By class of memory; empty where only the total was recorded."""
    total: int


def measured_peaks() -> list[MeasuredPeak]:
    """All rows: jax 0.10.2 and torch 2.13.0 on a CPU, float32."""
    return msgspec.json.decode((DATA / "peaks.json").read_bytes(), type=list[MeasuredPeak])
