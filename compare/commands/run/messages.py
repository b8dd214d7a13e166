"""Figure of the messages of a step: a row for each engine, a box for each kind, axis and purpose."""

from collections.abc import Mapping

from compare.contract.communication import LOSS, METRICS, NORM, Communication, of_busiest_stage
from compare.contract.ledger import SCALAR
from compare.contract.record import Record
from compare.show.figures import COLOURS, INK, WIDE, Axes, Figure
from compare.text import human_bytes

PHASES = {"forward": "forward", "backward": "backward", "update": "update", "": "unknown phase"}
"""Phases of rows, in order, and their names."""
NARROWEST = 0.1
"""Least width of a phase, as a share of all bytes, so that its name fits."""
OTHER = "#9A9A9A"
"""Colour of kinds that no engine of ours uses."""
CHARACTER = 0.008
"""Width of a character in a box, as a share of the figure."""
Key = tuple[str, str, str, str]
"""Phase, kind, axis and purpose."""


def message_figure(records: Mapping[str, Record]) -> Figure | None:
    """The messages of a step by phase, in the order of the ledger; None if no engine sends any."""
    sent = {name: boxes_of(of_busiest_stage(record.ledger.rows)) for name, record in records.items()}
    if not any(sent.values()):
        return None
    widths = {phase: max(bytes_in(phase, boxes) for boxes in sent.values()) for phase in PHASES}
    least = NARROWEST * sum(widths.values())
    widths = {phase: max(width, least) for phase, width in widths.items() if width}

    def draw(axes: Axes) -> None:
        start, whole, places = 0.0, sum(widths.values()), []
        for phase, width in widths.items():
            for row, boxes in enumerate(sent.values()):
                left = start
                for (where, kind, axis, _), (size, calls) in boxes.items():
                    if where != phase:
                        continue
                    shade, box = COLOURS.get(kind, OTHER), ([(left, size)], (row + 0.06, 0.88))
                    axes.broken_barh(*box, facecolor=shade, edgecolor=INK, linewidth=0.5, label=kind)
                    room, counted = size / (CHARACTER * whole), f"{calls:,} call{'s' * (calls > 1)}"
                    head = f"{kind} over {axis}" if len(kind + axis) + 6 <= room else axis
                    lines = [head, human_bytes(size), counted]
                    if max(map(len, lines)) <= room:
                        middle, text = (left + size / 2, row + 0.5), "\n".join(lines)
                        axes.text(*middle, text, ha="center", va="center", color="black", fontsize=6.5)
                    left += size
            places.append(start)
            start += width
        for place in places[1:]:
            axes.axvline(place, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xticks(places, [PHASES[phase] for phase in widths], ha="left")
        names = [
            f"{name}\n{human_bytes(sum(size for size, _ in boxes.values()))}" for name, boxes in sent.items()
        ]
        axes.set_yticks([row + 0.5 for row in range(len(sent))], names)
        axes.set(xlim=(0, whole), ylim=(len(sent), 0))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return Figure(
        title="Messages of a step",
        caption="Widths are logical bytes of one device, on one scale, not times. A box is all calls of one "
        "kind over one axis for one purpose. Loss and norm are left out. A pipeline shows its busiest stage.",
        draw=draw,
        width=WIDE,
        height=0.5 + 0.5 * len(sent),
    )


def boxes_of(rows: list[Communication]) -> dict[Key, tuple[int, int]]:
    """Bytes and calls by phase, kind, axis and purpose, in the order of the rows, without loss and norm."""
    boxes: dict[Key, tuple[int, int]] = {}
    for row in rows:
        if row.bytes > SCALAR * row.calls and row.purpose not in (LOSS, METRICS, NORM):
            key = row.phase, row.kind, row.axis, row.purpose
            size, calls = boxes.get(key, (0, 0))
            boxes[key] = size + row.bytes, calls + row.calls
    return boxes


def bytes_in(phase: str, boxes: Mapping[Key, tuple[int, int]]) -> int:
    """Bytes of a phase."""
    return sum(size for (where, *_), (size, _) in boxes.items() if where == phase)
