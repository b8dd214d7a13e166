"""`make sweeps`: strategies side by side, and over more devices; docs/strategies.json for a page of the docs.

    python docs/strategies.py strong        # one of them; what is stored of the others stays

Times are an order of magnitude: `shardpair bench` says what is faster.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from compare.studies.sweep_outcome import SweepOutcome, read_outcome

FILE = Path(__file__).parent / "strategies.json"
SWEEPS = {
    "strategies": "sweep demo --model.n_layer 3 --train.max_iters 40",
    "strong": "sweep demo --model.n_layer 3 --train.max_iters 40 --scaling strong --presets ddp fsdp "
    "--devices 1 2 4 --engines jax-manual torch-manual",
    "weak": "sweep demo --model.n_layer 3 --train.max_iters 40 --scaling weak --presets ddp fsdp "
    "--devices 1 2 4 --engines jax-manual torch-manual",
}
"""Arguments of shardpair, by the name of the generated section of the page."""


def read_sweeps() -> dict[str, SweepOutcome]:
    """What is stored, by name; nothing before the first `make sweeps`."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, SweepOutcome]) if FILE.is_file() else {}


def main(names: list[str]) -> int:
    """Run the sweeps of these names, or all. Returns the exit code: 0 if every one passed."""
    if unknown := sorted(set(names) - set(SWEEPS)):
        print(f"{unknown[0]}: no such sweep (there are {', '.join(SWEEPS)})", file=sys.stderr)
        return 2
    for name in names or SWEEPS:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "sweep"
            command = [sys.executable, "-m", "compare", *shlex.split(SWEEPS[name]), "--run_dir", str(run_dir)]
            if code := subprocess.run(command, check=False).returncode:
                return code
            found = read_sweeps() | {name: read_outcome(run_dir)}
        ordered = {known: found[known] for known in SWEEPS if known in found}
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
