"""The benches of docs/performance.md, and what docs/data keeps of each."""

from pathlib import Path

from msgspec import Struct

from compare.host.json_files import read_json
from compare.judge.bench_rows import blocks
from compare.judge.statistics import Estimate
from compare.judge.timed_outcome import TimedOutcome
from compare.show.findings import Table
from compare.studies.bench import Bench

DATA = Path(__file__).parent / "data"
NOT_YET = "Not measured yet: `make performance` measures it."
SIX_LAYERS = "bench baby-gpt --model.block_size 128"
TORCH = "--engines torch-manual torch-library --baseline torch-library"
JAX = "--engines jax-compiler jax-manual --baseline jax-compiler.single"
SHORT = "--window 5 --windows 2"  # where a step takes a second
TOLD = (
    "bench baby-gpt --model.n_layer 3 --model.block_size 128 --train.batch_size 4 --presets ddp fsdp tp "
    "--devices 2 --window 5 --windows 1"
)

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
    "compilers-torch": f"{TOLD} --engines torch-compiler torch-library torch-manual "
    "--baseline torch-compiler",
    "compilers-jax": f"{TOLD} --engines jax-explicit jax-compiler jax-manual --baseline jax-explicit",
    "itself": f"{SIX_LAYERS} --train.batch_size 4 --engines torch-manual torch-manual --presets ddp "
    "--devices 2",
}
BENCHES |= {"torch-2-tensor-again": BENCHES["torch-2-tensor"]}
"""Arguments of shardpair, by the name of the generated section of docs/generated/performance.md."""


class Ratios(Struct, frozen=True):
    """One row's ratios to its baseline."""

    wall: Estimate
    cpu: Estimate


class Kept(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a bench: its tables as the study's own columns gave them, and their ratios."""

    command: str
    created_utc: str
    git_commit: str
    tables: list[Table]
    ratios: dict[str, Ratios] = {}
    """By the row's case."""
    about: list[str] = []
    warnings: list[str] = []
    left_out: dict[str, str] = {}


def read_kept(name: str) -> Kept | None:
    """What is stored of a bench; None before it was measured."""
    file = DATA / f"{name}.json"
    return read_json(file, Kept) if file.is_file() else None


def read_benches() -> dict[str, Kept]:
    """Every bench that was measured, by name."""
    return {name: stored for name in BENCHES if (stored := read_kept(name))}


def kept(arguments: str, outcome: TimedOutcome) -> Kept:
    """The part of a bench that the docs show."""
    found = Bench.findings(outcome, Path())
    return Kept(
        command=f"shardpair {arguments}",
        created_utc=outcome.circumstances.created_utc,
        git_commit=outcome.circumstances.git_commit,
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
