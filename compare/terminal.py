"""The terminal: consoles that print text as it is, and numbers and layouts as people read them.

A path or an engine's last words may hold what rich takes for markup: `runs/[/x]` ended a run that had
trained. So no console of ours knows markup; colour comes from `style=` and from `coloured`.
"""

import math
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from compare.spec.experiment import Experiment, Layout

PIPE_WIDTH = 160  # a table in a log should not be cut to the 80 columns that rich assumes there
ZERO = {1: "optimizer state", 2: "optimizer state and gradients"}
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero_bubble": "zero-bubble",
}


class PlainConsole(Console):
    """A console that prints any text as it is."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Called by rich for every str that it prints, in cells of tables too."""
        return super().render_str(printable(text, keep="\n"), **options)


def results_console() -> PlainConsole:
    """Standard output: as wide as the terminal, or wide enough for any table in a pipe."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=PIPE_WIDTH)


def errors_console() -> PlainConsole:
    """Standard error, for lines that are not cut."""
    return PlainConsole(stderr=True, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON value on standard output, for machines."""
    print(msgspec.json.encode(value).decode(), flush=True)


def coloured(text: str, style: str) -> Text:
    """Text for a cell or a line, in a colour."""
    return Text(printable(text, keep="\n"), style=style)


def printable(text: str, *, keep: str = "") -> str:
    """`text` with what a terminal would obey, or an encoding refuse, spelled out: \\x1b, \\n, \\udce9."""
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def human_bytes(count: float) -> str:
    """Bytes in decimal units, three significant digits: 1.23 MB is 1.23e6 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5:  # what rounds to 1000 belongs to the next unit
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} EB"


def human_seconds(seconds: float) -> str:
    """A span of time to the precision that matters: 4.2 s, 31 s, 2 min 5 s, 1 h 12 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def error_text(error: float) -> str:
    """A relative error; in words where there is none to give."""
    if not math.isfinite(error):
        return "differs"
    return "exact" if error == 0 else f"{error:.1e}"


def layout_in_words(experiment: Experiment, platform: str) -> str:
    """The experiment's layout in one line.

    Such as "fully sharded over 2, pipeline of 2 stages, 1F1B with 4 microbatches: 4 CPU devices". The passes
    of gradient accumulation share a pipeline's schedule.
    """
    layout = experiment.layout
    parts = [_data_parallel(experiment), _expert_parallel(layout), _context_parallel(layout)]
    parts += [_tensor_parallel(experiment), _pipeline(experiment)]
    words = ", ".join(part for part in parts if part) or "nothing split"
    devices = f"{layout.devices} {platform.upper()} device{'s' if layout.devices > 1 else ''}"
    return f"{words}: {devices}"


def _data_parallel(experiment: Experiment) -> str:
    layout = experiment.layout
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


def _expert_parallel(layout: Layout) -> str:
    return f"experts shared out over {layout.ep}" if layout.ep > 1 else ""


def _context_parallel(layout: Layout) -> str:
    way = f"{layout.context}{', zigzag' * layout.zigzag}"
    return f"context parallel over {layout.cp} ({way})" if layout.cp > 1 else ""


def _tensor_parallel(experiment: Experiment) -> str:
    layout = experiment.layout
    split = "tensor and sequence" if layout.sequence_parallel else "tensor"
    return f"{split} parallel over {layout.tp}" if layout.tp > 1 else ""


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
