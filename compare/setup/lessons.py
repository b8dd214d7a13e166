"""Lessons: the strategies, their files in each engine, and the run that each lesson shows.

A strategy has the same file name in each engine's folder, and in some engines more files (`MORE_FILES`). Its
lesson shows one real run of a small experiment under one preset, with all engines that can run it.
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


MORE_FILES = {
    "jax-compiler": {"jaxpar/tick_loop.py": ("pipeline_parallel",)},
    "jax-explicit": {
        "jaxpar/explicit/sharding_types.py": tuple(LESSONS),
        "jaxpar/tick_loop.py": ("pipeline_parallel",),
    },
    "jax-manual": {
        "jaxpar/manual/ring.py": ("context_parallel",),
        "jaxpar/manual/stage.py": ("pipeline_parallel",),
    },
    "torch-manual": {
        "torchpar/manual/sharded_optimizer.py": ("fully_sharded",),
        "torchpar/manual/vocab_parallel.py": ("tensor_parallel",),
        "torchpar/manual/split.py": ("tensor_parallel", "expert_parallel"),
        "torchpar/manual/ring.py": ("context_parallel",),
        "torchpar/manual/blocks.py": ("context_parallel",),
        "torchpar/manual/stage.py": ("pipeline_parallel",),
        "torchpar/manual/zero_bubble.py": ("pipeline_parallel",),
        "torchpar/tied_weights.py": ("pipeline_parallel",),
    },
    "torch-library": {
        "torchpar/qkv_order.py": ("tensor_parallel",),
        "torchpar/manual/expert_parallel.py": ("expert_parallel",),
        "torchpar/tied_weights.py": ("pipeline_parallel",),
    },
    "torch-compiler": {
        "torchpar/compiler/placement.py": (
            *("data_parallel", "fully_sharded", "tensor_parallel", "expert_parallel"),
        ),
        "torchpar/qkv_order.py": ("tensor_parallel",),
    },
}
"""Files of an engine that have lines of strategies, and the strategies."""
SHARED_FILES = {
    "__init__.py": "composes the strategies",
    "strategy.py": "the type of a strategy of jax-manual",
}
"""Files in engines' folders that belong to no strategy, and what they do."""


def run_command(strategy: str) -> str:
    """The command of a lesson's run."""
    lesson = LESSONS[strategy]
    return f"shardpair run {lesson.experiment} --preset {lesson.preset} --devices {lesson.devices}"


def source_files(engine: str, strategy: str) -> list[str]:
    """A strategy's files in an engine, relative to the folder of both sides; the first has its name."""
    more = [path for path, strategies in MORE_FILES[engine].items() if strategy in strategies]
    return [f"{FOLDERS[engine]}/{strategy}.py", *more]
