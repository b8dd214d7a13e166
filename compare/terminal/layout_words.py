"""A layout in words: what is split over what, and on how many devices."""

from compare.spec.experiment import Experiment

ZERO = {1: "optimizer state", 2: "optimizer state and gradients"}
REDUCTIONS = {
    "naive": " (a reduction per parameter)",
    "flat": " (one reduction for all gradients)",
    "overlapped": " (a reduction per gradient, during backward)",
}
"""Ways to reduce gradients other than in buckets."""
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero_bubble": "zero-bubble",
}


def layout_in_words(experiment: Experiment, platform: str) -> str:
    """The experiment's layout in one line.

    Args:
        experiment: its layout, and the accumulated passes that share a pipeline's schedule.
        platform: cpu or gpu.

    Returns:
        "fully sharded over 2, tensor parallel over 2, pipeline of 2 stages, 1F1B with 4 microbatches: 8 CPU
        devices".
    """
    layout = experiment.layout
    parts = [_data_parallel(experiment), _tensor_parallel(experiment), _pipeline(experiment)]
    words = ", ".join(part for part in parts if part) or "nothing split"
    devices = f"{layout.devices} {platform.upper()} device{'s' if layout.devices > 1 else ''}"
    return f"{words}: {devices}"


def _data_parallel(experiment: Experiment) -> str:
    layout = experiment.layout
    if layout.dp_shard == 1:
        reduced = REDUCTIONS.get(layout.gradient_sync, "")
        return f"data parallel over {layout.dp_replicate}{reduced}" if layout.dp_replicate > 1 else ""
    if layout.zero == 3:
        kept = "" if layout.reshard_after_forward else " (gathered parameters kept until backward)"
        split = f"fully sharded over {layout.dp_shard}{kept}"
    else:
        split = f"{ZERO[layout.zero]} split over {layout.dp_shard} (ZeRO-{layout.zero})"
    return f"{layout.dp_replicate} replicas, each {split}" if layout.dp_replicate > 1 else split


def _tensor_parallel(experiment: Experiment) -> str:
    layout = experiment.layout
    what = "tensor and sequence" if layout.sequence_parallel else "tensor"
    return f"{what} parallel over {layout.tp}" if layout.tp > 1 else ""


def _pipeline(experiment: Experiment) -> str:
    layout, passes = experiment.layout, experiment.train.gradient_accumulation_steps
    if layout.pp == 1:
        return ""
    stages = (
        f"{layout.pp} ranks with {layout.chunks} stages each" if layout.chunks > 1 else f"{layout.pp} stages"
    )
    microbatches = layout.microbatches * passes
    accumulated = f" ({layout.microbatches} in each of {passes} accumulated passes)" if passes > 1 else ""
    count = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}{accumulated}"
    return f"pipeline of {stages}, {SCHEDULES[layout.schedule]} with {count}"
