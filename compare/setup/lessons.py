"""Lessons: the strategies, their files in each engine, and the run that each lesson shows.

A strategy has the same file name in each engine's folder. Its lesson shows one real run of a small experiment
under one preset, with all engines that can run it.
"""

from msgspec import Struct

from compare.spec.axes import CP, DP_REPLICATE, DP_SHARD, EP, PP, TP
from compare.spec.engines.registry import JAX, TORCH

FOLDERS = {e.name: f"{side.name}/{e.folder}" for side in (JAX, TORCH) for e in side.engines}
"""Engine -> the folder of its strategies."""


class Lesson(Struct, frozen=True):
    """One strategy."""

    title: str
    axis: str
    """Its mesh axis."""
    preset: str
    devices: int
    experiment: str = "check"
    """The experiment of its run: small, in float64, with biases and accumulation."""


LESSONS = {
    "data_parallel": Lesson("Data parallelism", DP_REPLICATE, "ddp", 2),
    "fully_sharded": Lesson("Fully sharded data parallelism (ZeRO-3)", DP_SHARD, "fsdp", 2),
    "tensor_parallel": Lesson("Tensor parallelism", TP, "tp", 2),
    "context_parallel": Lesson("Context parallelism", CP, "cp", 2),
    "expert_parallel": Lesson("Expert parallelism", EP, "fsdp_ep", 2, "experts"),
    "pipeline_parallel": Lesson("Pipeline parallelism", PP, "pp_gpipe", 4),
}


def run_command(strategy: str) -> str:
    """The command of a lesson's run."""
    lesson = LESSONS[strategy]
    return f"shardpair run {lesson.experiment} --preset {lesson.preset} --devices {lesson.devices}"


def source_file(engine: str, strategy: str) -> str:
    """A strategy's file in an engine, relative to the folder of both sides."""
    return f"{FOLDERS[engine]}/{strategy}.py"
