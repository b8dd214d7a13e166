"""The page and the picture of the bucket study: measured overhead over bucket size, and the closed forms."""

from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from compare.host.disk import write_atomically
from compare.judge.bench import BENCH, BenchResult
from compare.judge.bench_agreement import mistakes
from compare.judge.bucket_study import BUCKETED, RESULT, BucketStudy, Point, mb_text
from compare.judge.closed_forms.buckets import exposed_s, overlapped_s
from compare.judge.statistics import interval_words
from compare.present.bench_words import warnings
from compare.present.buckets import COLUMNS, about, cells, title
from compare.present.report.canvas import INK, OKABE_ITO, figure_for_page, inline_svg
from compare.present.report.pictures import Picture
from compare.present.report.saved import save_figure
from compare.present.report.tables import Row, Table, Text
from compare.present.report.template import render_page

PAGE = "buckets.html"
SIZE = (8.0, 4.8)  # inches
COLOURS = dict(zip((BUCKETED, "overlapped", "flat", "naive"), OKABE_ITO, strict=False))
MARKERS = dict(zip(COLOURS, "os^D", strict=True))
CURVE_POINTS = 200


def write_page(folder: Path, result: BenchResult, study: BucketStudy) -> Path:
    """Write `folder/buckets.html`. Returns its path."""
    with figure_for_page(SIZE) as figure:
        _draw(figure, study)
        drawn = inline_svg(figure, f"{title(study)}: overhead over bucket size")
    intervals = interval_words(point.overhead_ms for point in study.points)
    page = render_page(
        "study.html",
        title=title(study),
        sentence=study.sentence(),
        state="fail" if result.failures or mistakes(result) else "",
        about=[
            f"{result.machine.system}, {result.machine.cpu_model}, {result.machine.cores} cores. "
            f"{result.created_utc[:16].replace('T', ' ')} UTC. "
            f"{result.finished_rounds} rounds of fresh processes.",
            *about(study),
        ],
        warnings=warnings(result),
        pictures=[
            Picture(
                "Overhead over bucket size",
                drawn,
                f"Medians over rounds; whiskers are {intervals}. The lines are "
                "closed forms: overlapped if backward takes as long for a bucket as its bytes do, exposed if "
                "nothing runs beside backward. A size is the gradients over the number of buckets.",
            )
        ],
        tables=[
            Table(
                name="Every way",
                corner="gradients",
                columns=list(COLUMNS),
                rows=[
                    Row(Text(point.name), [Text(c) for c in cells(study, point)]) for point in study.points
                ],
            )
        ],
        notes=[],
        command="",
        result=result,
        data=f"{RESULT} and {BENCH}",
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def save_picture(path: Path, study: BucketStudy) -> None:
    """Save the picture as a file: .png, .svg or .pdf."""

    def draw(figure: Figure) -> None:
        _draw(figure, study)
        figure.axes[0].set_title(title(study), loc="left")

    save_figure(path, draw, size=SIZE)


def _draw(figure: Figure, study: BucketStudy) -> None:
    axes = figure.subplots()
    size_mb = study.gradient_bytes / 1e6
    for point in sorted(study.points, key=lambda point: list(COLOURS).index(point.gradient_sync)):
        _mark(axes, point, size_mb / point.buckets)
    most = max([point.buckets for point in study.points] + [study.predicted_buckets])
    buckets = np.geomspace(1, most if np.isfinite(most) else 100, CURVE_POINTS)
    line = {"bandwidth": study.bandwidth, "latency_s": study.latency_s}
    for form, label, dashes in (
        (overlapped_s, "closed form, overlapped: s/(n w) + n o", "-"),
        (exposed_s, "closed form, exposed: s/w + n o", ":"),
    ):
        overheads = [form(study.gradient_bytes, float(n), **line) * 1e3 for n in buckets]
        axes.plot(size_mb / buckets, overheads, color=INK, linestyle=dashes, linewidth=1.2, label=label)
    _best(axes, study, size_mb)
    axes.set(xlabel="bucket size (MB)", ylabel="overhead of a step (ms)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.grid(alpha=0.25, linewidth=0.6)
    keys: dict[str, Artist] = {}
    drawn = zip(*axes.get_legend_handles_labels(), strict=True)
    for handle, label in sorted(drawn, key=lambda key: not key[1].startswith("measured, ")):
        keys.setdefault(label, handle)
    figure.legend(keys.values(), keys.keys(), loc="outside upper left", ncols=2, fontsize="small")


def _mark(axes: Axes, point: Point, bucket_mb: float) -> None:
    overhead = point.overhead_ms
    whiskers = None
    if overhead.low is not None and overhead.high is not None:
        whiskers = [[overhead.median - overhead.low], [overhead.high - overhead.median]]
    axes.errorbar(
        [bucket_mb],
        [overhead.median],
        yerr=whiskers,
        fmt=MARKERS[point.gradient_sync],
        color=COLOURS[point.gradient_sync],
        capsize=3,
        label=f"measured, {point.gradient_sync}",
    )


def _best(axes: Axes, study: BucketStudy, size_mb: float) -> None:
    """Two vertical lines: the predicted best bucket, and the measured one."""
    if np.isfinite(study.predicted_buckets):
        axes.axvline(
            study.predicted_bucket_mb,
            color=OKABE_ITO[4],
            linestyle="--",
            linewidth=1.4,
            label=f"predicted best: {mb_text(study.predicted_bucket_mb)}",
        )
    if study.best:
        axes.axvline(
            size_mb / study.best.buckets,
            color=COLOURS[BUCKETED],
            linestyle="--",
            linewidth=1.4,
            label=f"measured best: {study.best.name} asked for, {study.best.buckets} buckets",
        )
