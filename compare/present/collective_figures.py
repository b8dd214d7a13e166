"""The figures of `shardpair collectives`: time and bus bandwidth over size, a line for each way."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from compare.contract.collective_bench import IMPLEMENTATIONS, CollectiveRow
from compare.show.findings import Figure, Series

ORDER = list(IMPLEMENTATIONS)
MOST_TICKS = 6
DASHES = ("-", "--", ":", "-.")
"""Of numbers of ranks, in order; more begin anew."""
MARKS = "os^Dv"
"""Of implementations, so that colour is not all that tells them apart."""


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
    times = Figure(
        title=f"{kind}: time over size",
        caption="Of the slowest rank. Both axes are logarithmic.",
        x="size (bytes; K, M, G are powers of 1024)",
        y="time (us), slowest rank",
        log="xy",
        ticks={size: _size_text(size) for size in sizes[:: -(-len(sizes) // MOST_TICKS)]},
        is_small=True,
        series=_curves(rows, lambda row: row.time_us),
    )
    bandwidths = msgspec.structs.replace(
        times,
        title=f"{kind}: bus bandwidth over size",
        caption="What a rank sends on a ring, over the time. Sizes are on a logarithmic axis.",
        y="bus bandwidth (GB/s)",
        log="x",
        y_form="{x:g}",
        series=_curves(rows, lambda row: row.busbw_gb_s),
    )
    return [times, bandwidths]


def _curves(rows: Sequence[CollectiveRow], value: Callable[[CollectiveRow], float]) -> list[Series]:
    """A line for each way and number of ranks; in the legend each way, and each number, once."""
    ways = [
        Series(label=name, x=(), colour=ORDER.index(name), mark=MARKS[ORDER.index(name) % len(MARKS)])
        for name in ways_of(rows)
    ]
    counts = [
        Series(label=f"{count} ranks", x=(), dash=DASHES[place % len(DASHES)])
        for place, count in enumerate(ranks_of(rows))
    ]
    curves = [
        msgspec.structs.replace(
            way,
            label="",
            dash=number.dash,
            x=[row.size for row in own],
            y=[value(row) for row in own],
        )
        for way in ways
        for count, number in zip(ranks_of(rows), counts, strict=True)
        if (own := [row for row in rows if (row.implementation, row.ranks) == (way.label, count)])
    ]
    return [*ways, *counts, *curves]


def _size_text(size: float) -> str:
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}G"
