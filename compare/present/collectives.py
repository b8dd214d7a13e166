"""What the benchmark of collectives found: nccl-tests' columns, fitted lines, figures over size."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from compare.contract.collective_bench import IMPLEMENTATIONS, CollectiveRow
from compare.execute.load import is_busy
from compare.judge.collective_fit import Fit
from compare.show.findings import Column, Figure, Findings, Series, table_of
from compare.studies.collectives import RESULT, CollectiveBench

ORDER = list(IMPLEMENTATIONS)
MOST_TICKS = 6
DASHES = ("-", "--", ":", "-.")
"""Of numbers of ranks, in order; more begin anew."""
MARKS = "os^Dv"
"""Of implementations, so that colour is not all that tells them apart."""

COLUMNS = (
    Column[CollectiveRow]("size (B)", lambda row: row.size, ",d"),
    Column[CollectiveRow]("count", lambda row: row.count, ",d"),
    Column[CollectiveRow]("type", lambda row: row.type),
    Column[CollectiveRow]("way", lambda row: row.implementation),
    Column[CollectiveRow]("time (us)", lambda row: row.time_us, ",.1f"),
    Column[CollectiveRow]("algbw (GB/s)", lambda row: row.algbw_gb_s, ".3f"),
    Column[CollectiveRow]("busbw (GB/s)", lambda row: row.busbw_gb_s, ".3f"),
    Column[CollectiveRow](
        "#wrong", lambda row: row.wrong, ",d", news=lambda row: "fail" if row.wrong else ""
    ),
)
FIT_COLUMNS = (
    Column[Fit]("collective", lambda fit: fit.kind),
    Column[Fit]("ranks", lambda fit: fit.ranks, "d"),
    Column[Fit]("way", lambda fit: fit.implementation),
    Column[Fit]("latency (us)", lambda fit: fit.latency_us, ",.1f"),
    Column[Fit]("bandwidth (GB/s)", lambda fit: fit.bandwidth_gb_s or None, ".3f"),
    Column[Fit]("misfit", lambda fit: fit.misfit, ".0%"),
)


def findings_of_bench(bench: CollectiveBench) -> Findings:
    """A table for each collective and number of ranks, the fits, two figures for each collective."""
    kinds = list(dict.fromkeys(row.kind for row in bench.rows))
    groups = [(kind, ranks) for kind in kinds for ranks in _ranks(bench.rows)]
    tables = [
        table_of(f"{kind} on {ranks} ranks", COLUMNS, rows)
        for kind, ranks in groups
        if (rows := _in_order(row for row in bench.rows if (row.kind, row.ranks) == (kind, ranks)))
    ]
    fits = sorted(bench.fits, key=lambda fit: (fit.kind, fit.ranks, ORDER.index(fit.implementation)))
    if fits:
        tables.append(table_of("time = latency + size / bandwidth, fitted", FIT_COLUMNS, fits))
    sides = bench.sides.values()
    devices = dict.fromkeys(f"{side.device_kind}, {side.threads}" for side in sides)
    versions = {name: version for side in sides for name, version in side.versions.items()}
    return Findings(
        title="Collectives: latency and bandwidth",
        sentence=bench.sentence(),
        value=bench,
        passed=bench.passed,
        about=[
            " ".join(["; ".join(devices), ", ".join(f"{name} {what}" for name, what in versions.items())]),
            "Columns of nccl-tests: size is the total, count one rank's elements, the time that of the "
            "slowest rank; busbw is what a rank sends on a ring over that time. On a CPU ranks share the "
            "cores.",
        ],
        warnings=_busy(bench),
        tables=tables,
        figures=[figure for kind in kinds for figure in _figures(bench, kind)],
        notes=[
            *(f"{name}: {IMPLEMENTATIONS[name].description}." for name in _ways(bench.rows)),
            *dict.fromkeys(f"{note}." for side in sides for note in side.notes),
            *(f"left out: {line}." for line in bench.left_out),
            "Each time weighs by its own size in the fit; misfit is the median distance of a time from the "
            "line.",
        ],
        command=bench.command,
        source=f"{bench.circumstances.words} Every single figure is in {RESULT}, beside this page.",
    )


def _busy(bench: CollectiveBench) -> list[str]:
    cores = max(bench.circumstances.busy_cores, default=0.0)
    if not is_busy(cores):
        return []
    return [f"other processes used {cores:.1f} cores when the first row was timed: no time holds"]


def _in_order(rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """By size, ways next to each other."""
    return sorted(rows, key=lambda row: (row.size, ORDER.index(row.implementation)))


def _ways(rows: Sequence[CollectiveRow]) -> list[str]:
    """Implementations that there are, in their declared order."""
    return [name for name in ORDER if any(row.implementation == name for row in rows)]


def _ranks(rows: Sequence[CollectiveRow]) -> list[int]:
    return sorted({row.ranks for row in rows})


def _figures(bench: CollectiveBench, kind: str) -> list[Figure]:
    """Time and bus bandwidth of a collective over size."""
    rows = _in_order(row for row in bench.rows if row.kind == kind)
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
        for name in _ways(rows)
    ]
    counts = [
        Series(label=f"{count} ranks", x=(), dash=DASHES[place % len(DASHES)])
        for place, count in enumerate(_ranks(rows))
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
        for count, number in zip(_ranks(rows), counts, strict=True)
        if (own := [row for row in rows if (row.implementation, row.ranks) == (way.label, count)])
    ]
    return [*ways, *counts, *curves]


def _size_text(size: float) -> str:
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}G"
