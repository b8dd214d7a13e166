"""`make moves`: trainings that stop and go on elsewhere, held against uninterrupted ones; docs/moves.json.

Forty steps in float64, without a stop; and the same, stopped once or twice, and gone on on another layout, on
fewer devices, in the other framework; every second kind of journey with dropout. What is kept is the largest
difference of any weight and of either moment at step 40, of the uninterrupted run of the engine that began.
It takes some minutes.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from compare import api
from compare.checkpoint.description import CHECKPOINTS, folder_name
from compare.judge.checkpoint_difference import difference

MOVES = Path(__file__).parent / "moves.json"
STEPS, HALF = 40, 20
RATES = (0.0, 0.2)
FSDP, ONE = {"dp_shard": 2, "zero": 3}, {"dp_shard": 1, "zero": 0}
ENGINES = ("torch-manual", "torch-library", "jax-manual", "jax-compiler")


class Leg(Struct, frozen=True):
    """A part of a training: up to which step, by whom, on which layout."""

    until: int
    engine: str
    layout: dict[str, object]


JOURNEYS: dict[str, list[list[Leg]]] = {
    "same layout": [[Leg(HALF, name, FSDP), Leg(STEPS, name, FSDP)] for name in ENGINES],
    "another layout: fsdp over 2, then tp over 2": [
        [Leg(HALF, name, FSDP), Leg(STEPS, name, {**ONE, "tp": 2})] for name in ENGINES
    ],
    "more devices: fsdp over 2, then fsdp x tp over 4": [
        [Leg(HALF, name, FSDP), Leg(STEPS, name, {**FSDP, "tp": 2})] for name in ENGINES
    ],
    "fewer devices: fsdp over 2, then one": [
        [Leg(HALF, name, FSDP), Leg(STEPS, name, ONE)] for name in ENGINES
    ],
    "the other framework": [
        [Leg(HALF, "torch-manual", FSDP), Leg(STEPS, "jax-manual", FSDP)],
        [Leg(HALF, "jax-manual", FSDP), Leg(STEPS, "torch-manual", FSDP)],
        [Leg(HALF, "torch-library", FSDP), Leg(STEPS, "jax-compiler", FSDP)],
        [Leg(HALF, "jax-compiler", FSDP), Leg(STEPS, "torch-library", FSDP)],
    ],
    "there and back: a pipeline of the other framework in between": [
        [
            Leg(HALF, "torch-manual", FSDP),
            Leg(30, "jax-manual", {**ONE, "pp": 2, "microbatches": 4}),
            Leg(STEPS, "torch-manual", FSDP),
        ],
        [
            Leg(HALF, "jax-manual", FSDP),
            Leg(30, "torch-manual", {**ONE, "pp": 2, "microbatches": 4}),
            Leg(STEPS, "jax-manual", FSDP),
        ],
    ],
}


class Journey(Struct, frozen=True, kw_only=True):
    """What came of one training."""

    dropout: float
    engines: list[str]
    """Of its legs."""
    difference: dict[str, float]
    """At the end, by weights, m and v."""


def read_moves() -> dict[str, list[Journey]]:
    """What is stored, by the name of the journey; {} before the first `make moves`."""
    if not MOVES.is_file():
        return {}
    return msgspec.json.decode(MOVES.read_bytes(), type=dict[str, list[Journey]])


def train(leg: Leg, folder: Path, resume: Path | None, *, dropout: float) -> Path:
    """One leg. Returns its last checkpoint."""
    experiment = api.experiment(
        "check",
        model={"dropout": dropout},
        train={"max_iters": leg.until},
        layout=leg.layout,
        checkpoint={"every": HALF, "keep": 3},
    )
    api.run(
        experiment,
        engines=[leg.engine],
        run_dir=folder,
        resume="" if resume is None else str(resume),
        ladder=False,
        quiet=True,
    )
    return folder / leg.engine / CHECKPOINTS / folder_name(leg.until)


def measure(folder: Path) -> dict[str, list[Journey]]:
    """Make all journeys, in a folder that is there."""
    begun = {
        (engine, dropout): train(
            Leg(STEPS, engine, FSDP), folder / f"whole-{engine}-{dropout}", None, dropout=dropout
        )
        for engine in ENGINES
        for dropout in RATES
    }
    found: dict[str, list[Journey]] = {}
    for number, (name, journeys) in enumerate(JOURNEYS.items()):
        dropout = RATES[number % len(RATES)]
        for which, (first, *others) in enumerate(journeys):
            whole = begun[first.engine, dropout]
            place = whole.with_name(folder_name(first.until))
            for place_of, leg in enumerate(others):
                place = train(leg, folder / f"{number}-{which}-{place_of}", place, dropout=dropout)
            engines = [leg.engine for leg in (first, *others)]
            journey = Journey(dropout=dropout, engines=engines, difference=difference(place, whole))
            print(f"{name}: {' > '.join(journey.engines)}: {journey.difference}", file=sys.stderr, flush=True)
            found.setdefault(name, []).append(journey)
    return found


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    try:
        MOVES.write_bytes(msgspec.json.format(msgspec.json.encode(measure(place)), indent=1) + b"\n")
    finally:
        shutil.rmtree(place)
