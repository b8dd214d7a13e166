"""The rows of the grid as lessons: which run each is built from, and what to try next.

A strategy has the same file name in each engine's folder. Its lesson shows one real run, of the `check`
experiment under one preset, with all engines that can express it.
"""

import importlib.util
from pathlib import Path

from msgspec import Struct

from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, TP
from compare.spec.engines.registry import JAX, TORCH
from compare.spec.experiment import Experiment, load
from compare.studies.presets import spread

FOLDERS = {e.name: f"{side.name}/{e.folder}" for side in (JAX, TORCH) for e in side.engines}
"""The folder of each engine's lessons."""
EXPERIMENT = "check"
"""Float64 and small, with every feature that can go wrong: what a lesson's run trains."""


class Trial(Struct, frozen=True, kw_only=True):
    """An experiment to try."""

    question: str
    command: str
    watch: str
    """What changes, and why."""


class Lesson(Struct, frozen=True, kw_only=True):
    """One row of the grid."""

    title: str
    axis: str
    """The mesh axis that it is about."""
    preset: str
    devices: int
    trials: tuple[Trial, Trial, Trial]


LESSONS = {
    "data_parallel": Lesson(
        title="Data parallelism",
        axis=DP_REPLICATE,
        preset="ddp",
        devices=2,
        trials=(
            Trial(
                question="What do buckets buy?",
                command="shardpair run check --preset ddp_naive --devices 2",
                watch="One all-reduce for each parameter instead of each bucket: jax-manual and torch-manual "
                "make more calls, and the bytes stay what they were, 8 for each parameter.",
            ),
            Trial(
                question="What does XLA do if nobody tells it to wait?",
                command="shardpair run check --preset ddp --devices 2 --train.gradient_accumulation_steps 1",
                watch="Without a loop over passes jax-compiler leaves everything to XLA. It reduces the tied "
                "embedding's gradient twice, once for each use: more bytes than the three others.",
            ),
            Trial(
                question="What do more devices cost?",
                command="shardpair run check --preset ddp --devices 4",
                watch="Logical bytes do not depend on the number of replicas n. On a ring each device sends "
                "2 (n - 1) / n of them: 1.5 times the gradients instead of once.",
            ),
        ),
    ),
    "fully_sharded": Lesson(
        title="Fully sharded data parallelism (ZeRO-3)",
        axis=DP_SHARD,
        preset="fsdp",
        devices=2,
        trials=(
            Trial(
                question="What does freeing parameters after forward cost?",
                command="shardpair run check --preset shard_grad_op --devices 2",
                watch="layout.reshard_after_forward is off: what forward has gathered stays for backward, "
                "and the bytes of all_gather fall to half, or below where passes share one gather. What is "
                "held meanwhile shows in the peak memory.",
            ),
            Trial(
                question="Why shard parameters at all?",
                command="shardpair run check --preset zero1 --devices 2",
                watch="ZeRO-1 splits the moments alone: parameters and gradients at rest are whole again, "
                "and parameters are gathered once a step, after the update, and not in every pass.",
            ),
            Trial(
                question="What if shards are near and replicas far?",
                command="shardpair run check --preset hsdp --devices 4",
                watch="Hybrid sharding: gathers stay within dp_shard, and one more row appears, an "
                "all_reduce over dp_replicate of what reduce_scatter has left: half of the gradients.",
            ),
        ),
    ),
    "tensor_parallel": Lesson(
        title="Tensor parallelism",
        axis=TP,
        preset="tp",
        devices=2,
        trials=(
            Trial(
                question="Where did the all-reduce go?",
                command="shardpair run check --preset tp_sp --devices 2",
                watch="Sequence parallelism cuts each all_reduce in two, a reduce_scatter and an all_gather "
                "of the same bytes on a ring, and between them norms and residuals are split. New: one "
                "all_reduce of the gradients of what is not split.",
            ),
            Trial(
                question="Does it send less on more devices?",
                command="shardpair run check --preset tp --devices 4",
                watch="No: every device has all activations of its batch, so the logical bytes stay. Memory "
                "at rest falls, but for norms and row biases, which every device repeats.",
            ),
            Trial(
                question="What do replicas add?",
                command="shardpair run check --preset ddp_tp --devices 4",
                watch="Each replica has half of the rows: the bytes along tp halve. Along dp_replicate the "
                "gradients are reduced, and each device's are half of them.",
            ),
        ),
    ),
    "pipeline_parallel": Lesson(
        title="Pipeline parallelism",
        axis=PP,
        preset="pp_gpipe",
        devices=4,
        trials=(
            Trial(
                question="What does another order change?",
                command="shardpair run check --preset pp --devices 4",
                watch="1F1B sends the same messages and holds fewer activations at once. jax-compiler is "
                "left out: autodiff orders its backwards, after all forwards.",
            ),
            Trial(
                question="How much of the time do ranks wait?",
                command="shardpair run check --layout.pp 4 --layout.schedule gpipe --layout.microbatches 8",
                watch="Twice the microbatches, half as large: twice the calls of permute, and the same "
                "bytes. Ranks wait for (p - 1) / (m + p - 1) of the time: the less, the more microbatches m.",
            ),
            Trial(
                question="What if each rank has two stages?",
                command="shardpair run check --preset pp_interleaved --devices 2",
                watch="A microbatch goes round the ring twice: twice the messages of two stages, and a "
                "shorter wait at both ends.",
            ),
        ),
    ),
}
STRATEGIES = tuple(LESSONS)


def lesson_experiment(strategy: str) -> Experiment:
    """What the run of a lesson trains."""
    lesson = LESSONS[strategy]
    return spread(load(EXPERIMENT), lesson.preset, lesson.devices)


def run_command(strategy: str) -> str:
    """The command that makes the same run without a lesson."""
    lesson = LESSONS[strategy]
    return f"shardpair run {EXPERIMENT} --preset {lesson.preset} --devices {lesson.devices}"


def source_root() -> Path:
    """The folder of both sides, which is beside `compare`: found without importing them."""
    spec = importlib.util.find_spec("compare")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def source_file(engine: str, strategy: str) -> str:
    """A strategy's file in an engine, relative to `source_root`."""
    return f"{FOLDERS[engine]}/{strategy}.py"
