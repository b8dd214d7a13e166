"""The rows of the grid as lessons: and the run that each is built from.

A strategy has the same file name in each engine's folder. Its lesson shows one real run, of a small
experiment under one preset, with all engines that can express it.
"""

from pathlib import Path

from msgspec import Struct

from compare.spec.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from compare.spec.engines.registry import JAX, TORCH

FOLDERS = {e.name: f"{side.name}/{e.folder}" for side in (JAX, TORCH) for e in side.engines}
"""The folder of each engine's lessons."""
SOURCES = Path(__file__).parents[2]
"""The folder of both sides, which is beside `compare`."""


class Lesson(Struct, frozen=True):
    """One row of the grid."""

    title: str
    axis: str
    """The mesh axis that it is about."""
    preset: str
    devices: int
    experiment: str = "check"
    """What its run trains: float64 and small, with every feature that can go wrong."""


LESSONS = {
    "data_parallel": Lesson("Data parallelism", DP_REPLICATE, "ddp", 2),
    "fully_sharded": Lesson("Fully sharded data parallelism (ZeRO-3)", DP_SHARD, "fsdp", 2),
    "tensor_parallel": Lesson("Tensor parallelism", TP, "tp", 2),
    "context_parallel": Lesson("Context parallelism", CP, "cp", 2),
    "expert_parallel": Lesson("Expert parallelism", EP, "fsdp_ep", 2, "experts"),
    "pipeline_parallel": Lesson("Pipeline parallelism", PP, "pp_gpipe", 4),
}


def run_command(strategy: str) -> str:
    """The command that makes the same run without a lesson."""
    lesson = LESSONS[strategy]
    return f"shardpair run {lesson.experiment} --preset {lesson.preset} --devices {lesson.devices}"


def source_file(engine: str, strategy: str) -> str:
    """A strategy's file in an engine, relative to `SOURCES`."""
    return f"{FOLDERS[engine]}/{strategy}.py"
