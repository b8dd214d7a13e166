"""A pipeline schedule as a picture: a row for each rank, a box for each task."""

import io
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from compare.host.disk import write_atomically
from compare.pipeline.schedules import Kind, Schedule
from compare.pipeline.simulator import Slot, bubble_fraction, makespan, peak_in_flight, run
from compare.present.report.canvas import figure_for_page, inline_svg, own_style

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.BACKWARD_INPUT: "#F0C419",
    Kind.BACKWARD_WEIGHT: "#009E73",
}
LATER_CHUNK = 0.55  # opacity of a rank's chunks after its first
NARROWEST = 0.13  # inches of a forward that still has room for its number
PAGE_WIDTH = 10.0  # inches


def save_timelines(path: Path, schedules: dict[str, Schedule]) -> None:
    """Draw schedules under each other on one time axis, and save them through a temporary name.

    Args:
        path: of the picture; its suffix is its format: .png, .svg, .pdf.
        schedules: by title.
    """
    heights = [0.9 + 0.36 * len(schedule) for schedule in schedules.values()]
    with own_style({"font.size": 9, "svg.hashsalt": "shardpair"}):
        figure = Figure(figsize=(12, sum(heights) + 0.3), layout="constrained")
        _draw_all(figure, {f"{name}: {summary(one)}": one for name, one in schedules.items()}, heights)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=120)
    write_atomically(path, buffer.getvalue())


def timeline(title: str, schedule: Schedule) -> Markup:
    """One schedule as an <svg> element for the page, in its ink.

    Args:
        title: its name for those who cannot see it.
        schedule: what each rank does, in order.
    """
    height = 0.9 + 0.3 * len(schedule)
    with figure_for_page((PAGE_WIDTH, height)) as figure:
        _draw_all(figure, {"": schedule}, [height])
        return inline_svg(figure, title)


def summary(schedule: Schedule) -> str:
    """Makespan, waiting and memory of a schedule, in words."""
    held = ", ".join(str(peak_in_flight(own)) for own in schedule)
    return (
        f"makespan {makespan(schedule):g}, ranks wait {bubble_fraction(schedule):.0%} of the time, at most "
        f"{held} activations held"
    )


def _draw_all(figure: Figure, schedules: dict[str, Schedule], heights: list[float]) -> None:
    timelines = {title: run(schedule) for title, schedule in schedules.items()}
    longest = max(slot.end for slots in timelines.values() for slot in slots)
    rows = figure.subplots(len(schedules), 1, height_ratios=heights, squeeze=False)
    numbered = figure.get_figwidth() / longest > NARROWEST
    for axes, (title, schedule) in zip(rows[:, 0], schedules.items(), strict=True):
        _draw(axes, schedule, timelines[title], numbered=numbered)
        axes.set_title(title, loc="left")
        axes.set(xlim=(0, longest), ylim=(len(schedule), 0), yticks=[r + 0.5 for r in range(len(schedule))])
        axes.set_yticklabels([f"rank {rank}" for rank in range(len(schedule))])
    rows[-1, 0].set_xlabel("time, in forwards of one microbatch through one rank")
    used = {slot.task.kind for slots in timelines.values() for slot in slots}
    keys = {NAMES[kind]: Patch(color=COLOURS[kind]) for kind in Kind if kind in used}
    figure.legend(keys.values(), keys.keys(), loc="outside lower right", ncols=len(keys), frameon=False)


def _draw(axes, schedule: Schedule, slots: list[Slot], *, numbered: bool) -> None:
    for rank, task, start, end in slots:
        opacity = 1.0 if task.stage < len(schedule) else LATER_CHUNK
        box = Rectangle(
            (start, rank + 0.04),
            end - start,
            0.92,
            facecolor=COLOURS[task.kind],
            alpha=opacity,
            edgecolor="white",
        )
        axes.add_patch(box)
        if numbered:
            middle = (start + end) / 2
            axes.text(middle, rank + 0.5, str(task.microbatch), ha="center", va="center", color="black")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
