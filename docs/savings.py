"""`make savings`: what of a device's memory each setting saves, measured; docs/savings.json.

One setting after the other on the same small experiment, whose logits, activations and state are about as
large as each other. Peaks and bytes at rest are the records' own.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.api import experiment, run
from compare.contract.record import ON_HOST
from compare.host.json_files import write_json

SAVINGS = Path(__file__).parent / "savings.json"
ENGINES = ("torch-manual", "jax-compiler", "jax-manual")
SIZES = {
    "model": {"n_layer": 6, "n_head": 4, "n_embd": 128, "block_size": 128, "vocab_size": 8192},
    "train": {"max_iters": 3, "batch_size": 8},
}
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


def read_savings() -> dict[str, dict[str, Held]]:
    """What is stored, by setting and engine; {} before the first `make savings`."""
    kind = dict[str, dict[str, Held]]
    return msgspec.json.decode(SAVINGS.read_bytes(), type=kind) if SAVINGS.is_file() else {}


def measure(edits: dict[str, dict[str, object]]) -> dict[str, Held]:
    """Train with a setting, in all engines on one device."""
    sections = {name: {**SIZES.get(name, {}), **edits.get(name, {})} for name in SIZES | edits}
    held = {}
    with tempfile.TemporaryDirectory() as scratch:
        spec = experiment("demo", **sections)
        options = {"engines": list(ENGINES), "preset": "single", "ladder": False, "quiet": True}
        for training in run(spec, run_dir=Path(scratch) / "run", **options):
            rest = {kind: sizes[0] for kind, sizes in training.manifest.resident_bytes.items()}
            held[training.name] = Held(
                peak=training.manifest.peak_memory_bytes[0],
                at_rest=rest["parameters"] + rest["optimizer"],
                on_host=rest.get(ON_HOST, 0),
                peak_method=training.manifest.peak_memory_method,
            )
    return held


def main() -> None:
    """Measure every setting."""
    found = {}
    for name, edits in SETTINGS.items():
        found[name] = measure(edits)
        print(name, found[name], file=sys.stderr, flush=True)
    write_json(SAVINGS, found)


if __name__ == "__main__":
    main()
