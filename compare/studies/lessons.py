"""The rows of the grid as lessons: which run each is built from, and what to try next.

A strategy has the same file name in each engine's folder. Its lesson shows one real run, of the `check`
experiment under one preset, with all engines that can express it.
"""

from pathlib import Path

from msgspec import Struct

from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, TP
from compare.spec.engines.registry import JAX, TORCH

FOLDERS = {e.name: f"{side.name}/{e.folder}" for side in (JAX, TORCH) for e in side.engines}
"""The folder of each engine's lessons."""
SOURCES = Path(__file__).parents[2]
"""The folder of both sides, which is beside `compare`."""
EXPERIMENT = "check"
"""Float64 and small, with every feature that can go wrong: what a lesson's run trains."""


class Trial(Struct, frozen=True):
    """An experiment to try."""

    question: str
    options: str
    watch: str
    """What changes, and why."""

    @property
    def command(self) -> str:
        """The command line."""
        return f"shardpair run {EXPERIMENT} {self.options}"


class Lesson(Struct, frozen=True):
    """One row of the grid."""

    title: str
    axis: str
    """The mesh axis that it is about."""
    preset: str
    devices: int


LESSONS = {
    "data_parallel": Lesson("Data parallelism", DP_REPLICATE, "ddp", 2),
    "fully_sharded": Lesson("Fully sharded data parallelism (ZeRO-3)", DP_SHARD, "fsdp", 2),
    "tensor_parallel": Lesson("Tensor parallelism", TP, "tp", 2),
    "pipeline_parallel": Lesson("Pipeline parallelism", PP, "pp_gpipe", 4),
}
TRIALS = {
    "data_parallel": (
        Trial(
            "What do buckets buy?",
            "--preset ddp_naive --devices 2",
            "One all-reduce for each parameter instead of each bucket: jax-manual and torch-manual "
            "make more calls, and the bytes stay what they were, 8 for each parameter.",
        ),
        Trial(
            "What does XLA do if nobody tells it to wait?",
            "--preset ddp --devices 2 --train.gradient_accumulation_steps 1",
            "Without a loop over passes jax-compiler leaves everything to XLA. It reduces the tied "
            "embedding's gradient twice, once for each use: more bytes than the three others.",
        ),
    ),
    "fully_sharded": (
        Trial(
            "What does freeing parameters after forward cost?",
            "--preset shard_grad_op --devices 2",
            "What forward has gathered stays for backward: the bytes of all_gather fall to half, or "
            "below where passes share one gather. The peak memory shows what is held meanwhile.",
        ),
        Trial(
            "Why shard parameters at all?",
            "--preset zero1 --devices 2",
            "ZeRO-1 splits the moments alone: parameters and gradients at rest are whole again, "
            "and parameters are gathered once a step, after the update, and not in every pass.",
        ),
    ),
    "tensor_parallel": (
        Trial(
            "Where did the all-reduce go?",
            "--preset tp_sp --devices 2",
            "Sequence parallelism cuts each in two, a reduce_scatter and an all_gather of the same bytes. "
            "Norms between them are split. New: one all_reduce of gradients of what is not split.",
        ),
        Trial(
            "Does it send less on more devices?",
            "--preset tp --devices 4",
            "No: every device has all activations of its batch, so the logical bytes stay. Memory "
            "at rest falls, but for norms and row biases, which every device repeats.",
        ),
    ),
    "pipeline_parallel": (
        Trial(
            "What does another order change?",
            "--preset pp --devices 4",
            "1F1B sends the same messages and holds fewer activations at once. jax-compiler is "
            "left out: autodiff orders its backwards, after all forwards.",
        ),
        Trial(
            "How much of the time do ranks wait?",
            "--layout.pp 4 --layout.schedule gpipe --layout.microbatches 8",
            "Twice the microbatches, half as large: twice the calls of permute, the same bytes. Ranks "
            "wait for (p - 1) / (m + p - 1) of the time: the less, the more microbatches m.",
        ),
    ),
}


def run_command(strategy: str) -> str:
    """The command that makes the same run without a lesson."""
    lesson = LESSONS[strategy]
    return f"shardpair run {EXPERIMENT} --preset {lesson.preset} --devices {lesson.devices}"


def source_file(engine: str, strategy: str) -> str:
    """A strategy's file in an engine, relative to `SOURCES`."""
    return f"{FOLDERS[engine]}/{strategy}.py"
