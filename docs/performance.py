"""`make performance`: run the benches whose results docs/performance.md shows; docs/performance.json.

On an idle machine: a bench refuses to time on a busy one. All of it takes some hours. Some benches by name:

    python docs/performance.py torch-2 itself

What is kept of each is its command, its rows and the sentences below its table. It is set aside in runs/ as
soon as it is there, and put into docs/performance.json when all have run, or by the next call: a file that
changed between two benches would be a change of the source, which they record. What is stored for other
benches stays. After a bench that fails nothing is stored for it, and the exit code says so.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.host.json_files import write_json
from compare.judge.bench_rows import blocks
from compare.judge.outcome import OUTCOME, TimedOutcome, read_outcome
from compare.judge.statistics import Estimate
from compare.present.bench_words import sentences, warnings
from compare.show.findings import Table
from compare.studies.bench import Bench

CTRL_C = 130
PERFORMANCE = Path(__file__).parent / "performance.json"
ASIDE = Path(__file__).parents[1] / "runs" / "performance"
"""Of git ignored."""
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
"""Arguments of shardpair, by the name of the generated section of the page."""


class Block(Struct, frozen=True):
    """One table: its title, its header and its cells as text."""

    title: str
    header: list[str]
    rows: list[list[str]]

    @property
    def name(self) -> str:
        """`TimedCase.block`, which the title begins with."""
        return self.title.partition(":")[0]


class Ratios(Struct, frozen=True):
    """One row's ratios to its baseline."""

    wall: Estimate
    cpu: Estimate


class Performance(Struct, frozen=True, kw_only=True):
    """What is kept of one bench."""

    command: str
    created_utc: str
    git_commit: str
    blocks: list[Block]
    ratios: dict[str, Ratios]
    """By the row's case."""
    sentences: list[str]
    warnings: list[str]
    left_out: dict[str, str]


def read_performance() -> dict[str, Performance]:
    """What is stored, by name; nothing before the first `make performance`."""
    if not PERFORMANCE.is_file():
        return {}
    return msgspec.json.decode(PERFORMANCE.read_bytes(), type=dict[str, Performance])


def kept(arguments: str, result: TimedOutcome) -> Performance:
    """The part of a bench that the page shows."""
    found = blocks(result)
    return Performance(
        command=f"shardpair {arguments}",
        created_utc=result.circumstances.created_utc,
        git_commit=result.circumstances.git_commit,
        blocks=[_block(table) for table in Bench.findings(result, Path()).tables],
        ratios={
            row.case: Ratios(row.wall_ratio, row.cpu_ratio)
            for rows in found.values()
            for row in rows
            if row.wall_ratio and row.cpu_ratio
        },
        sentences=sentences(result),
        warnings=warnings(result),
        left_out=result.left_out,
    )


def _block(table: Table) -> Block:
    rows = [[row.head.text, *(cell.text for cell in row.cells)] for row in table.rows]
    return Block(table.name, [table.corner, *table.columns], rows)


def write(stored: dict[str, Performance]) -> None:
    """Keep them for the docs, in the order of `BENCHES`."""
    ordered = {name: stored[name] for name in BENCHES if name in stored}
    PERFORMANCE.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


def main(names: list[str]) -> int:
    """Run the benches of these names, or all. Returns the exit code: 0 if every one finished."""
    if unknown := sorted(set(names) - set(BENCHES)):
        print(f"{unknown[0]}: no such bench (there are {', '.join(BENCHES)})", file=sys.stderr)
        return 2
    collect()
    worst = 0
    for name in names or BENCHES:
        print(f"{name}: shardpair {BENCHES[name]}", file=sys.stderr)
        code, result = _measured(BENCHES[name])
        worst = max(worst, code)
        if code == CTRL_C:
            break
        if code == 0 and result:
            ASIDE.mkdir(parents=True, exist_ok=True)
            write_json(ASIDE / f"{name}.json", kept(BENCHES[name], result))
    collect()
    return worst


def collect() -> None:
    """Put what was set aside into docs/performance.json."""
    found = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Performance) for path in ASIDE.glob("*.json")
    }
    if found:
        write(read_performance() | found)
        shutil.rmtree(ASIDE)


def _measured(arguments: str) -> tuple[int, TimedOutcome | None]:
    """Exit code of a bench, and what it saved, if it began."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "bench"
        command = [sys.executable, "-m", "compare", *shlex.split(arguments), "--run_dir", str(run_dir)]
        code = subprocess.run(command, check=False).returncode
        return code, read_outcome(run_dir, TimedOutcome) if (run_dir / OUTCOME).is_file() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
