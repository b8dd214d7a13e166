"""The page and the picture of the benchmark of collectives: time and bus bandwidth over size."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from compare.contract.collective_bench import IMPLEMENTATIONS, CollectiveRow
from compare.host.disk import write_atomically
from compare.present.collectives import (
    COLUMNS,
    FIT_COLUMNS,
    busy_line,
    fit_cells,
    fits_in_order,
    groups,
    row_cells,
    rows_of,
    ways,
)
from compare.present.report.canvas import INK, colour, figure_for_page, inline_svg
from compare.present.report.pictures import Picture
from compare.present.report.saved import save_figure
from compare.present.report.tables import Row, Table, Text
from compare.present.report.template import render_page
from compare.studies.collectives import RESULT, CollectiveBench

PAGE = "collectives.html"
SIZE = (10.0, 3.2)  # inches of one collective's two pictures
LEGEND = 0.4
MOST_TICKS = 6
DASHES = ("-", "--", ":", "-.")
"""Of numbers of ranks, in order; more begin anew."""
MARKERS = "os^Dv"
"""Of implementations, so that colour is not all that tells them apart."""


def write_page(folder: Path, bench: CollectiveBench) -> Path:
    """Write `folder/collectives.html`: pictures, every row, the fits. Returns its path."""
    kinds = list(dict.fromkeys(row.kind for row in bench.rows))
    devices = dict.fromkeys(f"{side.device_kind}, {side.threads}" for side in bench.sides.values())
    versions = {name: v for side in bench.sides.values() for name, v in side.versions.items()}
    page = render_page(
        "study.html",
        title="Collectives: latency and bandwidth",
        sentence=bench.sentence(),
        state="pass" if bench.passed else "fail",
        about=[
            f"{bench.machine}, {'; '.join(devices)}. {bench.created_utc[:16].replace('T', ' ')} UTC.",
            ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "Columns of nccl-tests: size is the total, count one rank's elements, the time that of the "
            "slowest rank; busbw is what a rank sends on a ring over that time. On a CPU ranks share the "
            "cores.",
        ],
        warnings=list(filter(None, [busy_line(bench)])),
        pictures=[_picture(bench, kind) for kind in kinds],
        tables=[_fit_table(bench), *(_row_table(bench, kind, ranks) for kind, ranks in groups(bench.rows))],
        notes=[
            *(f"{name}: {IMPLEMENTATIONS[name].description}." for name in ways(bench.rows)),
            *dict.fromkeys(f"{note}." for side in bench.sides.values() for note in side.notes),
            *(f"Left out: {line}." for line in bench.left_out),
            "Time is fitted as latency + size / bandwidth, each time weighted by its own size; misfit is the "
            "median distance of a time from that line.",
        ],
        command=bench.command,
        result=bench,
        data=RESULT,
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def save_picture(path: Path, bench: CollectiveBench) -> None:
    """Save a row of pictures for each collective as one file: .png, .svg or .pdf."""
    kinds = list(dict.fromkeys(row.kind for row in bench.rows))

    def draw(figure: Figure) -> None:
        parts = figure.subfigures(len(kinds), 1, squeeze=False)[:, 0]
        for part, kind in zip(parts, kinds, strict=True):
            _draw(part, [row for row in bench.rows if row.kind == kind])
            part.suptitle(kind, fontweight="bold")
        _legend(figure, bench.rows)

    save_figure(path, draw, size=(SIZE[0], SIZE[1] * len(kinds) + LEGEND))


def _picture(bench: CollectiveBench, kind: str) -> Picture:
    rows = [row for row in bench.rows if row.kind == kind]
    title = f"{kind}: time and bus bandwidth over size"
    with figure_for_page((SIZE[0], SIZE[1] + LEGEND)) as figure:
        _draw(figure, rows)
        _legend(figure, rows)
        return Picture(kind, inline_svg(figure, title), "Sizes and times are on logarithmic axes.")


def _draw(figure: Figure | SubFigure, rows: list[CollectiveRow]) -> None:
    left, right = figure.subplots(1, 2)
    _curves(left, rows, lambda row: row.time_us)
    left.set(yscale="log", ylabel="time (us), slowest rank")
    _curves(right, rows, lambda row: row.busbw_gb_s)
    right.set(ylabel="bus bandwidth (GB/s)")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set(xlabel="size (bytes; K, M, G are powers of 1024)")
        axes.set_xscale("log")
        _name_sizes(axes, sorted({row.size for row in rows}))
        axes.grid(alpha=0.25, linewidth=0.6)


def _name_sizes(axes: Axes, sizes: list[int]) -> None:
    """Ticks at some of the sizes, and their names."""
    shown = sizes[:: -(-len(sizes) // MOST_TICKS)]
    axes.set_xticks(shown, [_size_text(size) for size in shown])
    axes.minorticks_off()


def _size_text(size: float) -> str:
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}G"


def _curves(axes: Axes, rows: list[CollectiveRow], value: Callable[[CollectiveRow], float]) -> None:
    for name in ways(rows):
        for place, ranks in enumerate(_ranks(rows)):
            mine = sorted(
                (row for row in rows if (row.implementation, row.ranks) == (name, ranks)),
                key=lambda row: row.size,
            )
            axes.plot(
                [row.size for row in mine],
                [value(row) for row in mine],
                color=_colour(name),
                linestyle=DASHES[place % len(DASHES)],
                marker=_marker(name),
                markersize=3.5,
                linewidth=1.4,
            )


def _legend(figure: Figure, rows: list[CollectiveRow]) -> None:
    names = [Line2D([], [], color=_colour(name), marker=_marker(name), label=name) for name in ways(rows)]
    ranks = [
        Line2D([], [], color=INK, linestyle=DASHES[place % len(DASHES)], label=f"{count} ranks")
        for place, count in enumerate(_ranks(rows))
    ]
    figure.legend(handles=[*names, *ranks], loc="outside upper left", ncols=len(names) + len(ranks))


def _ranks(rows: list[CollectiveRow]) -> list[int]:
    return sorted({row.ranks for row in rows})


def _colour(name: str) -> str:
    return colour(list(IMPLEMENTATIONS).index(name))


def _marker(name: str) -> str:
    return MARKERS[list(IMPLEMENTATIONS).index(name) % len(MARKERS)]


def _row_table(bench: CollectiveBench, kind: str, ranks: int) -> Table:
    lines = [
        [Text(text, news="fail" if bad else "") for text, bad in row_cells(row)]
        for row in rows_of(bench, kind, ranks)
    ]
    return Table(
        name=f"{kind} on {ranks} ranks",
        corner=COLUMNS[0],
        columns=list(COLUMNS[1:]),
        rows=[Row(line[0], line[1:]) for line in lines],
    )


def _fit_table(bench: CollectiveBench) -> Table:
    lines = [[Text(text) for text in fit_cells(fit)] for fit in fits_in_order(bench)]
    return Table(
        name="Latency and bandwidth",
        corner=FIT_COLUMNS[0],
        columns=list(FIT_COLUMNS[1:]),
        rows=[Row(line[0], line[1:]) for line in lines],
    )
