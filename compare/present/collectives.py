"""The figures of `shardpair collectives`: time and bus bandwidth over size, a line for each way."""

import itertools
from collections.abc import Iterable
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


def ways_of(rows: Iterable[CollectiveRow]) -> list[str]:
    """Implementations that there are, in their declared order."""
    return sorted({row.implementation for row in rows}, key=ORDER.index)


def ranks_of(rows: Iterable[CollectiveRow]) -> list[int]:
    """Numbers of ranks that there are."""
    return sorted({row.ranks for row in rows})


def figures_of(rows: Iterable[CollectiveRow], kind: str) -> list[Figure]:
    """Time and bus bandwidth of a collective over size."""
    rows = in_order(row for row in rows if row.kind == kind)
    sizes = sorted({row.size for row in rows})
    dashes = dict(zip(ranks_of(rows), itertools.cycle(DASHES), strict=False))

    def draw(axes: "Axes", field: str, y: str, *, logarithmic: str) -> None:
        for way, count in itertools.product(ways_of(rows), dashes):
            points = [row for row in rows if (row.implementation, row.ranks) == (way, count)]
            x, values = [row.size for row in points], [getattr(row, field) for row in points]
            number = ORDER.index(way)
            look = dashes[count] + MARKERS[number % len(MARKERS)]
            axes.plot(x, values, look, color=colour(number), markersize=4, label=way)
        for count, dash in dashes.items():
            axes.plot([], [], dash, color=INK, label=f"{count} ranks")
        log_scale(axes, *logarithmic)
        ticks(axes, {size: size_text(size) for size in sizes[:: -(-len(sizes) // MOST_TICKS)]})
        axes.set(xlabel="size (bytes; K, M, G are powers of 1024)", ylabel=y)

    return [
        Figure(
            title=f"{kind}: time over size",
            caption="Of the slowest rank.",
            draw=lambda axes: draw(axes, "time_us", "time (us), slowest rank", logarithmic="xy"),
        ),
        Figure(
            title=f"{kind}: bus bandwidth over size",
            caption="What a rank sends on a ring, over the time.",
            draw=lambda axes: draw(axes, "busbw_gb_s", "bus bandwidth (GB/s)", logarithmic="x"),
        ),
    ]


def size_text(size: float) -> str:
    """4096 as 4K."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}G"
