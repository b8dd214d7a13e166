"""`make performance`: the studies that the docs show; what each found is kept in docs/data/NAME.json.

On an idle machine: a study refuses to time on a busy one. All of them take some hours. Some by name:

    python docs/studies.py torch-2 accumulation

What is kept is set aside in runs/ as soon as it is there, and put into docs/data when all have run, or by the
next call: a file that changed between two studies would be a change of the source, which they record. What is
stored of others stays. After one that fails nothing is stored for it, and the exit code says so.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.host.disk import write_atomically
from compare.host.json_files import read_json
from compare.judge.bench_rows import blocks
from compare.judge.outcome import OUTCOME, Outcome, read_outcome
from compare.judge.statistics import Estimate
from compare.show.findings import Findings, Table
from compare.show.markdown import markdown
from compare.studies.registry import STUDIES

CTRL_C = 130
DATA = Path(__file__).parent / "data"
ASIDE = Path(__file__).parents[1] / "runs" / "performance"
"""Of git ignored."""
NOT_YET = "Not measured yet: `make performance` measures it."
SIX_LAYERS = "bench baby-gpt --model.block_size 128"
TORCH = "--engines torch-manual torch-library --baseline torch-library"
JAX = "--engines jax-compiler jax-manual --baseline jax-compiler.single"
SHORT = "--window 5 --windows 2"  # where a step takes a second

BENCHES = {
    "torch-2": f"{SIX_LAYERS} --train.batch_size 4 {TORCH} --presets ddp zero1 zero2 fsdp --devices 2",
    "torch-2-tensor": f"{SIX_LAYERS} --train.batch_size 2 {TORCH} --presets tp tp_sp --devices 2",
    "torch-2-pipeline": f"{SIX_LAYERS} --train.batch_size 8 {TORCH} --layout.pp 2 --layout.microbatches 8",
    "torch-4": f"{SIX_LAYERS} --train.batch_size 8 {TORCH} --presets ddp zero1 fsdp --devices 4 {SHORT}",
    "torch-2-long": f"{SIX_LAYERS} --train.batch_size 16 {TORCH} --presets ddp zero1 fsdp --devices 2 "
    f"{SHORT}",
    "jax-4": f"{SIX_LAYERS} --train.batch_size 8 {JAX} --presets single ddp zero1 fsdp --devices 4 {SHORT}",
    "jax-4-tensor": f"{SIX_LAYERS} --model.n_layer 8 --model.n_head 8 --train.batch_size 16 {JAX} "
    f"--presets single tp --devices 4 {SHORT}",
    "jax-4-pipeline": f"{SIX_LAYERS} --model.n_layer 8 --model.n_head 8 --train.batch_size 16 "
    "--engines jax-manual --presets single pp --devices 4 --variants layout.microbatches=16 "
    f"layout.microbatches=16,layout.remat=full --baseline jax-manual.single {SHORT}",
    "single": f"{SIX_LAYERS} --train.batch_size 8 --presets single --baseline nanogpt-loop --engines "
    "nanogpt-loop nanogpt-loop-compiled torch-manual plain-jit jax-compiler jax-manual",
    "deepspeed": f"{SIX_LAYERS} --train.batch_size 4 --engines torch-manual deepspeed --baseline deepspeed "
    "--presets zero1 zero2 fsdp --devices 2",
    "itself": f"{SIX_LAYERS} --train.batch_size 4 --engines torch-manual torch-manual --presets ddp "
    "--devices 2",
}
BENCHES |= {"torch-2-tensor-again": BENCHES["torch-2-tensor"]}
"""Arguments of shardpair, by the name of the generated section of docs/generated/performance.md."""
SHOWN = BENCHES | {"accumulation": "accumulation demo --layout.dp_replicate 2"}
"""Those of every study that the docs show."""


class Ratios(Struct, frozen=True):
    """One row's ratios to its baseline."""

    wall: Estimate
    cpu: Estimate


class Kept(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a study: its findings as the study's own columns gave them."""

    command: str
    created_utc: str
    git_commit: str
    sentence: str = ""
    tables: list[Table]
    ratios: dict[str, Ratios] = {}
    """Of a bench, by the row's case."""
    about: list[str] = []
    warnings: list[str] = []
    left_out: dict[str, str] = {}


def read_kept(name: str) -> Kept | None:
    """What is stored of a study; None before it was measured."""
    file = DATA / f"{name}.json"
    return read_json(file, Kept) if file.is_file() else None


def read_benches() -> dict[str, Kept]:
    """Every bench that was measured, by name."""
    return {name: stored for name in BENCHES if (stored := read_kept(name))}


def kept(arguments: str, outcome: Outcome, folder: Path) -> Kept:
    """The part of a study that the docs show."""
    found = STUDIES[outcome.study].findings(outcome, folder)
    return Kept(
        command=f"shardpair {arguments}",
        created_utc=outcome.circumstances.created_utc,
        git_commit=outcome.circumstances.git_commit,
        sentence=found.sentence,
        tables=list(found.tables),
        ratios={
            row.case: Ratios(row.wall_ratio, row.cpu_ratio)
            for rows in blocks(outcome).values()
            for row in rows
            if row.wall_ratio and row.cpu_ratio
        },
        about=list(found.about),
        warnings=list(found.warnings),
        left_out=found.left_out,
    )


def keep(found: Kept, path: Path) -> None:
    """Write what is kept, in one line: a machine's figures, which nobody edits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(found) + b"\n")


def study_section(name: str) -> str:
    """A study's command, tables and sentences; or that it was not run yet."""
    command, stored = f"```sh\nshardpair {SHOWN[name]}\n```", read_kept(name)
    if stored is None:
        return f"{command}\n\n{NOT_YET}"
    said = {"title": name, "value": None, "passed": True, "sentence": stored.sentence}
    found = Findings(**said, about=stored.about, warnings=stored.warnings, tables=stored.tables)
    return f"{command}\n\n{markdown(found)}"


def main(names: list[str]) -> int:
    """Run the studies of these names, or all. Returns the exit code: 0 if every one finished."""
    if unknown := sorted(set(names) - set(SHOWN)):
        print(f"{unknown[0]}: no such study (there are {', '.join(SHOWN)})", file=sys.stderr)
        return 2
    collect()
    worst = 0
    for name in names or SHOWN:
        print(f"{name}: shardpair {SHOWN[name]}", file=sys.stderr)
        code, found = _measured(SHOWN[name])
        worst = max(worst, code)
        if code == CTRL_C:
            break
        if code == 0 and found:
            keep(found, ASIDE / f"{name}.json")
    collect()
    return worst


def collect() -> None:
    """Put what was set aside into docs/data."""
    for path in ASIDE.glob("*.json"):
        DATA.mkdir(exist_ok=True)
        shutil.move(path, DATA / path.name)


def _measured(arguments: str) -> tuple[int, Kept | None]:
    """Exit code of a study, and what is kept of it, if it began."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "study"
        command = [sys.executable, "-m", "compare", *shlex.split(arguments), "--run_dir", str(run_dir)]
        code = subprocess.run(command, check=False).returncode
        begun = (run_dir / OUTCOME).is_file()
        return code, kept(arguments, read_outcome(run_dir), run_dir) if begun and code == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
