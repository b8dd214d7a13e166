"""`make memory`: what a device holds at the peak of a step, by class, in every engine; docs/memory.json.

A small experiment in float32 whose logits, activations and state are about as large as each other, on each of
some layouts. The figures are the records' own; closed forms are computed anew when the page is made.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.api import experiment, run
from compare.contract.memory_profile import Peak
from compare.host.json_files import write_json
from compare.present.memory_tables import AtPeak, at_peak
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.presets import preset_layout

MEMORY = Path(__file__).parent / "memory.json"
ENGINES = tuple(STUDIED)
LAYOUTS = {
    "single": 1,
    "ddp": 2,
    "zero1": 2,
    "zero2": 2,
    "fsdp": 2,
    "shard_grad_op": 2,
    "hsdp": 4,
    "tp": 2,
    "tp_sp": 2,
    "ddp_tp": 4,
    "fsdp_tp": 4,
    "fsdp_tp_sp": 4,
    "pp": 2,
    "pp_gpipe": 2,
}
"""Presets, and their devices."""
SIZES = {
    "model": {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 1024},
    "train": {"max_iters": 3, "batch_size": 8},
    "precision": {"dtype": "float32"},
    "layout": {"remat": "none", "dp_replicate": 1, "bucket_mb": 0.1},
}


class Held(Struct, frozen=True, kw_only=True):
    """The fullest device of one engine under one layout."""

    device: int
    peak: Peak


def spec_of(preset: str) -> Experiment:
    """The experiment under a layout."""
    spec = experiment("demo", **SIZES)
    layout = preset_layout(spec.layout, preset, LAYOUTS[preset])
    return msgspec.structs.replace(spec, layout=layout)


def read_memory() -> dict[str, dict[str, Held]]:
    """What is stored, by preset and engine; {} before the first `make memory`."""
    kind = dict[str, dict[str, Held]]
    return msgspec.json.decode(MEMORY.read_bytes(), type=kind) if MEMORY.is_file() else {}


def can_run(engine: str, spec: Experiment) -> bool:
    """False if the engine refuses the layout."""
    try:
        STUDIED[engine].require_experiment(spec, platform="cpu")
    except ExperimentError:
        return False
    return True


def measure(preset: str) -> dict[str, Held]:
    """Train under a layout, with all engines."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = spec_of(preset)
        options = {
            "engines": [name for name in ENGINES if can_run(name, spec)],
            "ladder": False,
            "quiet": True,
        }
        trainings = run(spec, run_dir=Path(scratch) / "run", **options)
        found: dict[str, AtPeak | None] = {one.name: at_peak(one.record) for one in trainings}
    return {name: Held(device=one.device, peak=one.peak) for name, one in found.items() if one}


def main() -> None:
    """Measure every layout, or those that are named."""
    found = read_memory() if sys.argv[1:] else {}
    for preset in sys.argv[1:] or LAYOUTS:
        found[preset] = measure(preset)
        print(preset, {name: one.peak for name, one in found[preset].items()}, file=sys.stderr, flush=True)
        write_json(MEMORY, {name: found[name] for name in LAYOUTS if name in found})


if __name__ == "__main__":
    main()
