"""Numbers and layouts as text."""

import math

from compare.spec.experiment import Experiment, Layout

ZERO = {1: "optimizer state", 2: "optimizer state and gradients"}
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero_bubble": "zero-bubble",
}


def human_bytes(count: float) -> str:
    """Bytes in decimal units, three significant digits: 1.23 MB is 1.23e6 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5:  # 999.5 rounds to 1000, in the next unit
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} EB"


def human_seconds(seconds: float) -> str:
    """A duration with about two digits: 4.2 s, 31 s, 2 min 5 s, 1 h 12 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def error_text(error: float) -> str:
    """A relative error, "exact" or "differs"."""
    if not math.isfinite(error):
        return "differs"
    return "exact" if error == 0 else f"{error:.1e}"


def layout_in_words(experiment: Experiment, platform: str) -> str:
    """The experiment's layout in one line.

    For example "fully sharded over 2, pipeline of 2 stages, 1F1B with 4 microbatches: 4 CPU devices".
    """
    layout = experiment.layout
    parts = [_data_parallel(layout)]
    if layout.ep > 1:
        parts.append(f"expert parallel over {layout.ep}")
    if layout.cp > 1:
        parts.append(f"context parallel over {layout.cp} ({layout.context}{', zigzag' * layout.zigzag})")
    if layout.tp > 1:
        split = "tensor and sequence" if layout.sequence_parallel else "tensor"
        parts.append(f"{split} parallel over {layout.tp}")
    if layout.pp > 1:
        parts.append(_pipeline(experiment))
    words = ", ".join(filter(None, parts)) or "nothing split"
    return f"{words}: {layout.devices} {platform.upper()} device{'s' if layout.devices > 1 else ''}"


def _data_parallel(layout: Layout) -> str:
    if not layout.zero:
        replicas = layout.dp_replicate * layout.dp_shard
        reduced = "" if layout.gradient_sync == "bucketed" else f" ({layout.gradient_sync} reductions)"
        return f"data parallel over {replicas}{reduced}" if replicas > 1 else ""
    if layout.zero == 3:
        kept = "" if layout.reshard_after_forward else " (gathered parameters kept until backward)"
        split = f"fully sharded over {layout.dp_shard}{kept}"
    else:
        split = f"{ZERO[layout.zero]} split over {layout.dp_shard} (ZeRO-{layout.zero})"
    return f"{layout.dp_replicate} replicas, each {split}" if layout.dp_replicate > 1 else split


def _pipeline(experiment: Experiment) -> str:
    """Stages and schedule; the passes of gradient accumulation share the schedule."""
    layout, passes = experiment.layout, experiment.train.gradient_accumulation_steps
    chunks = f"ranks with {layout.chunks} stages each" if layout.chunks > 1 else "stages"
    microbatches = experiment.microbatches_per_step
    accumulated = f" ({layout.microbatches} in each of {passes} accumulated passes)" if passes > 1 else ""
    count = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}{accumulated}"
    return f"pipeline of {layout.pp} {chunks}, {SCHEDULES[layout.schedule]} with {count}"
