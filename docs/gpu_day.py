"""`make gpu-day`: all that wants a GPU, in one go, when there is one; about half an hour on an H100.

    python docs/gpu_day.py                  # what is not done yet; results in runs/gpu-day
    python docs/gpu_day.py check-float32    # some of it
    python docs/gpu_day.py --dry_run        # plan everything on this machine's CPU; no engine starts

A step is done once its command has ended with 0: the next call begins with the first that is not. One that
fails is told, and the others still run.
"""

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from compare.host.disk import write_atomically

FOLDER = Path(__file__).parents[1] / "runs" / "gpu-day"
DONE = "done"
ONE = "--platform gpu --devices 1"
PASS = "--data.source synthetic --train.gradient_accumulation_steps 1"
SHORT = f"{PASS} --layout.dp_replicate 1"
BENCH = (
    f"--platform gpu {PASS} --presets single --devices 1 --baseline nanogpt-loop --engines nanogpt-loop "
    "nanogpt-loop-compiled torch-manual plain-jit jax-compiler jax-manual"
)
STEPS = {
    "doctor": "doctor",
    "check-float64": f"check check {ONE}",
    "check-float32": f"check check {ONE} --precision.dtype float32",
    "check-bfloat16": f"check check {ONE} --precision.dtype bfloat16",
    "golden": "golden --platform gpu",
    "ledger": "ledger check --platform gpu --preset single",
    "profile": f"profile gpt2-124m --platform gpu {SHORT} --train.batch_size 12",
    "memory": "memory demo --platform gpu --presets single",
    "savings": f"savings gpt2-124m --platform gpu {PASS} --train.batch_size 8",
    "bench-124m": f"bench gpt2-124m {BENCH} --train.batch_size 12",
    "bench-350m": f"bench gpt2-350m {BENCH} --train.batch_size 6 --rounds 3",
}
"""Arguments of shardpair, in the order in which they are run: what proves comes before what times."""
Run = Callable[[list[str]], int]
"""Arguments of shardpair -> exit code."""


def shardpair(arguments: list[str]) -> int:
    """Run a command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "compare", *arguments], check=False).returncode


def arguments_of(name: str, folder: Path, *, dry_run: bool) -> list[str]:
    """The command line of a step, its results in the folder; on the CPU and without a start for a plan."""
    words = shlex.split(STEPS[name])
    if dry_run:
        return ["cpu" if word == "gpu" else word for word in words] + ["--dry_run"]
    return words if name == "doctor" else [*words, "--run_dir", str(folder / name)]


def run_steps(names: Sequence[str], folder: Path, run: Run, *, dry_run: bool) -> dict[str, int]:
    """Exit code of every step that was not done yet; doctor has no plan.

    Args:
        names: of STEPS.
        folder: of the results.
        run: a command.
        dry_run: plan only.
    """
    codes = {}
    for name in names:
        mark = folder / f"{name}.{DONE}"
        if (dry_run and name == "doctor") or (not dry_run and mark.is_file()):
            continue
        print(f"{name}: shardpair {STEPS[name]}", file=sys.stderr)
        whole = arguments_of(name, folder, dry_run=dry_run)
        if (left := folder / name).exists() and not dry_run:  # of a step that failed, or was interrupted
            left.rename(next(path for n in range(1, 1000) if not (path := folder / f"{name}-{n}").exists()))
        codes[name] = run(whole)
        if codes[name] == 0 and not dry_run:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(mark, f"shardpair {STEPS[name]}\n".encode())
    return codes


def main(words: list[str]) -> int:
    """Run what is asked for. Returns the exit code: 0 if all is done, 2 for an unknown step, else 1."""
    dry_run, names = "--dry_run" in words, [word for word in words if word != "--dry_run"]
    if unknown := [name for name in names if name not in STEPS]:
        print(f"{unknown[0]}: no such step (there are {', '.join(STEPS)})", file=sys.stderr)
        return 2
    codes = run_steps(names or list(STEPS), FOLDER, shardpair, dry_run=dry_run)
    failed = [name for name, code in codes.items() if code]
    print(f"failed: {', '.join(failed)}" if failed else "all is done", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
