"""A measured step as a picture: for each device a row of what it computed, and a thin one of what it sent."""

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from compare.contract.record import Record
from compare.contract.timeline import Kind, Lane, Span, Timeline, exposed_us, idle_us
from compare.present.report.canvas import INK, figure_for_page, inline_svg
from compare.present.report.pictures import Picture

COLOURS: dict[Kind, str] = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "update": "#009E73",
    "communication": "#CC79A7",
}
WIDTH, ROW, AROUND = 10.0, 0.44, 0.95  # inches
COMPUTE, SENT = (0.06, 0.56), (0.66, 0.22)
"""Where in a device's row: its top, and its height."""
FINEST = 1 / 1000
"""Of the step: spans of a kind that are closer are drawn as one, narrower ones as broad as this."""
NARROWEST = 0.13  # inches of a microbatch that still has room for its number
LATER_CHUNK = 0.55  # opacity of a rank's chunks after its first


def measured_steps(names: Sequence[str], records: Sequence[Record]) -> list[Picture]:
    """A picture of every record that has a timeline."""
    return [
        Picture(
            f"{name}, step {record.timeline.step} as it was measured",
            draw_timeline(f"Timeline of step {record.timeline.step} of {name}", record.timeline),
            f"{in_words(record.timeline)} {record.timeline.method}",
        )
        for name, record in zip(names, records, strict=True)
        if record.timeline
    ]


def in_words(timeline: Timeline) -> str:
    """How long it took, and what of it was not compute, on the mean over the devices."""
    count = len(timeline.lanes)
    exposed = sum(map(exposed_us, timeline.lanes)) / count
    idle = sum(idle_us(lane, timeline.wall_us) for lane in timeline.lanes) / count
    return (
        f"{timeline.wall_us / 1e3:.1f} ms, of which a device spends {exposed / 1e3:.1f} ms in communication "
        f"with no compute beside it, and is idle for {idle / 1e3:.1f} ms."
    )


def draw_timeline(title: str, timeline: Timeline) -> Markup:
    """The timeline as an <svg> element for the page, in its ink."""
    with figure_for_page((WIDTH, AROUND + ROW * len(timeline.lanes))) as figure:
        axes = figure.subplots()
        end_us = max([timeline.wall_us, *(span.end_us for lane in timeline.lanes for span in lane.spans)])
        for row, lane in enumerate(timeline.lanes):
            _draw_lane(axes, row, lane, end_us)
        _finish(figure, axes, timeline, end_us)
        return inline_svg(figure, title)


def blended(spans: Iterable[Span], gap_us: float) -> list[tuple[float, float]]:
    """The spans as (begin, length) in milliseconds, those with less than a gap between them as one."""
    merged: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        if merged and span.begin_us - merged[-1][1] < gap_us:
            merged[-1][1] = max(merged[-1][1], span.end_us)
        else:
            merged.append([span.begin_us, span.end_us])
    return [(begin / 1e3, max(end - begin, gap_us) / 1e3) for begin, end in merged]


def _draw_lane(axes: Axes, row: int, lane: Lane, end_us: float) -> None:
    groups: dict[tuple[Kind, int, int], list[Span]] = {}
    for span in lane.spans:
        sent = span.kind == "communication"
        groups.setdefault((span.kind, -1 if sent else span.microbatch, span.chunk), []).append(span)
    inches = WIDTH / (end_us / 1e3)
    for (kind, microbatch, chunk), spans in groups.items():
        top, height = SENT if kind == "communication" else COMPUTE
        boxes = blended(spans, end_us * FINEST)
        numbered = microbatch >= 0
        look: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.4} if numbered else {"linewidth": 0}
        shapes = [_box(begin, row + top, length, height) for begin, length in boxes]
        area = Path.make_compound_path(*shapes)  # one path: a step has hundreds of spans
        opacity = LATER_CHUNK if chunk else 1.0
        axes.add_patch(PathPatch(area, facecolor=COLOURS[kind], alpha=opacity, **look))
        for begin, length in boxes if numbered else ():
            if length * inches > NARROWEST:
                axes.text(
                    begin + length / 2,
                    row + top + height / 2,
                    str(microbatch),
                    ha="center",
                    va="center",
                    color="black",
                    fontsize=7,
                )


def _box(x: float, y: float, width: float, height: float) -> Path:
    return Path.unit_rectangle().transformed(Affine2D().scale(width, height).translate(x, y))


def _finish(figure: Figure, axes: Axes, timeline: Timeline, end_us: float) -> None:
    rows = range(len(timeline.lanes))
    axes.set(xlim=(0, end_us / 1e3), ylim=(len(rows), 0), xlabel="ms")
    axes.set_yticks([row + 0.5 for row in rows], [f"device {lane.device}" for lane in timeline.lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    used = {span.kind for lane in timeline.lanes for span in lane.spans}
    keys = {kind: Patch(color=colour) for kind, colour in COLOURS.items() if kind in used}
    figure.legend(keys.values(), keys.keys(), loc="outside upper left", ncols=len(keys), fontsize="small")
