"""The figures of `shardpair collectives`: time and bus bandwidth over size, a line for each way."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from compare.contract.collective_bench import IMPLEMENTATIONS, CollectiveRow
from compare.show.figures import INK, MARKERS, Figure, colour, log_scale, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = list(IMPLEMENTATIONS)
MOST_TICKS = 6
DASHES = ("-", "--", ":", "-.")
"""Of numbers of ranks, in order; more begin anew."""


def in_order(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """By size, ways next to each other."""
    return sorted(rows, key=lambda row: (row.size, ORDER.index(row.implementation)))


def ways_of(rows: Sequence[CollectiveRow]) -> list[str]:
    """Implementations that there are, in their declared order."""
    return [name for name in ORDER if any(row.implementation == name for row in rows)]


def ranks_of(rows: Sequence[CollectiveRow]) -> list[int]:
    return sorted({row.ranks for row in rows})


def figures_of(every: Iterable[CollectiveRow], kind: str) -> list[Figure]:
    """Time and bus bandwidth of a collective over size."""
    rows = in_order(row for row in every if row.kind == kind)
    sizes = sorted({row.size for row in rows})
    shown = {float(size): size_text(size) for size in sizes[:: -(-len(sizes) // MOST_TICKS)]}

    def over_size(axes: "Axes", value: Callable[[CollectiveRow], float], y: str) -> None:
        for way in ways_of(rows):
            for place, count in enumerate(ranks_of(rows)):
                own = [row for row in rows if (row.implementation, row.ranks) == (way, count)]
                number = ORDER.index(way)
                axes.plot(
                    [row.size for row in own],
                    [value(row) for row in own],
                    DASHES[place % len(DASHES)],
                    color=colour(number),
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=4,
                    label=way,
                )
        for place, count in enumerate(ranks_of(rows)):
            axes.plot([], [], DASHES[place % len(DASHES)], color=INK, label=f"{count} ranks")
        axes.set(xlabel="size (bytes; K, M, G are powers of 1024)", ylabel=y)

    def times(axes: "Axes") -> None:
        over_size(axes, lambda row: row.time_us, "time (us), slowest rank")
        log_scale(axes, "x", "y")
        ticks(axes, shown)

    def bandwidths(axes: "Axes") -> None:
        over_size(axes, lambda row: row.busbw_gb_s, "bus bandwidth (GB/s)")
        log_scale(axes, "x")
        ticks(axes, shown)
        axes.set_ylim(bottom=0)

    return [
        Figure(title=f"{kind}: time over size", caption="Of the slowest rank.", draw=times),
        Figure(
            title=f"{kind}: bus bandwidth over size",
            caption="What a rank sends on a ring, over the time.",
            draw=bandwidths,
        ),
    ]


def size_text(size: float) -> str:
    """4096 as 4K."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}G"
