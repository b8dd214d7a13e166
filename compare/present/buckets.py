"""The bucket study on stdout, and its rows for the page."""

from rich.table import Table

from compare.judge.bench import BenchResult
from compare.judge.bucket_study import BUCKETED, BucketStudy, Point
from compare.judge.closed_forms.buckets import exposed_s, overlapped_s
from compare.present.bench_words import warnings
from compare.terminal.console import print_json, results_console
from compare.terminal.units import human_bytes

COLUMNS = ("buckets", "ms/step", "overhead ms", "overlapped: s/(n w) + n o", "exposed: s/w + n o")


def print_study(result: BenchResult, study: BucketStudy, *, as_json: bool) -> None:
    """Print each way's overhead beside what the closed forms say."""
    if as_json:
        print_json(study)
        return
    console = results_console()
    table = Table(title=title(study))
    for column in ("gradients", *COLUMNS):
        table.add_column(column, justify="left" if column == "gradients" else "right")
    for point in study.points:
        table.add_row(point.name, *cells(study, point))
    console.print(table)
    for line in (*about(study), *warnings(result)):
        console.print(line, soft_wrap=True)
    console.print(study.sentence(), style="bold green", soft_wrap=True)


def title(study: BucketStudy) -> str:
    """What was timed."""
    return f"Data parallelism over {study.devices} ranks, {human_bytes(study.gradient_bytes)} of gradients"


def about(study: BucketStudy) -> list[str]:
    """Sentences that say what the figures are."""
    bandwidth = f"{study.bandwidth / 1e9:.2f} GB/s" if study.fit.bandwidth_gb_s else "without limit"
    return [
        f"Overhead is a step less {study.alone_ms:.1f} ms, the step of one rank on the same tokens without "
        f"communication; so it holds, too, what ranks that share cores and memory take from each other.",
        f"An all-reduce on {study.devices} ranks here: o = {study.fit.latency_us:,.0f} us, w = {bandwidth} "
        f"(median misfit {study.fit.misfit:.0%}). Predicted best: {study.predicted_buckets:.1f} buckets, "
        f"{study.predicted_overhead_ms:.1f} ms.",
    ]


def cells(study: BucketStudy, point: Point) -> list[str]:
    """A point as texts, in the order of `COLUMNS`; a closed form only where it speaks of the point."""
    line = {"bandwidth": study.bandwidth, "latency_s": study.latency_s}
    overhead = point.overhead_ms
    interval = f" [{overhead.low:.1f}, {overhead.high:.1f}]" if overhead.has_interval else ""
    in_backward = point.gradient_sync in (BUCKETED, "overlapped")
    overlapped = overlapped_s(study.gradient_bytes, point.buckets, **line) * 1e3
    exposed = exposed_s(study.gradient_bytes, point.buckets, **line) * 1e3
    return [
        str(point.buckets),
        f"{point.wall_ms:.1f}",
        f"{overhead.median:.1f}{interval}",
        f"{overlapped:.1f}" if in_backward else "-",
        f"{exposed:.1f}",
    ]
