"""`make links`, its second part: collectives and gradient buckets over the capped link between two hosts.

    python docs/link_collectives.py         # on an idle machine: a quarter of an hour

At each cap the harness runs on the first host, with a hostfile, as a person would: `shardpair collectives`,
and `shardpair buckets` where the link is slow enough to tell. What it asks to be run on the other host is
run there. Latencies and bandwidths are fitted, and overheads of a step held against the closed forms.
"""

import sys
import tempfile
from pathlib import Path

import msgspec
from link_hosts import RATES_GBIT, TwoHosts
from msgspec import Struct

from compare.contract.communication import ring_wire_bytes
from compare.execute.here import here_and_now
from compare.host.disk import write_atomically
from compare.judge.bucket_overheads import Point
from compare.judge.circumstances import Circumstances
from compare.judge.collective_fit import Fit
from compare.show.findings import Row, Table, Text, written
from compare.show.markdown import markdown_table

DATA = Path(__file__).parent / "data" / "link-collectives.json"
NOT_YET = "Not measured yet: `make links` measures it."
COLLECTIVES = "--ranks 2 --kinds all_reduce all_gather reduce_scatter permute --max_size 4M"
BUCKETS = "cpu --data.source synthetic --train.batch_size 16 --bucket_mb 0.25 0.5 1 --window 5 --windows 2"
SLOW_GBIT = (1, 0.25)


class AtCap(Struct, frozen=True, kw_only=True):
    """What was found at one cap of the link."""

    gbit: float
    """0 for none."""
    bytes_per_s: float
    """Of one stream."""
    fits: list[Fit]
    points: list[Point] = []
    """Of torch-manual's gradients over two ranks, one a host; measured at slow caps."""


class LinkCollectives(Struct, frozen=True, kw_only=True):
    """All of it."""

    circumstances: Circumstances
    caps: list[AtCap]


def measured(hosts: TwoHosts, gbit: float, folder: Path) -> AtCap:
    """Both studies at one cap. Raises RuntimeError: one did not finish, or gave wrong results."""
    hosts.cap(gbit)
    bandwidth, _ = hosts.probe()
    bench = hosts.study(f"collectives {COLLECTIVES}".split(), folder / f"collectives-{gbit:g}")
    buckets = (
        hosts.study(f"buckets {BUCKETS}".split(), folder / f"buckets-{gbit:g}") if gbit in SLOW_GBIT else {}
    )
    return AtCap(
        gbit=gbit,
        bytes_per_s=bandwidth,
        fits=msgspec.convert(bench["fits"], list[Fit]),
        points=msgspec.convert(buckets.get("rows", []), list[Point]),
    )


def link_collectives_section() -> str:
    """Fits by cap, and overheads beside the closed forms."""
    if not DATA.is_file():
        return NOT_YET
    found = msgspec.json.decode(DATA.read_bytes(), type=LinkCollectives)
    return "\n\n".join(map(markdown_table, (fit_table(found), overhead_table(found))))


def fit_table(found: LinkCollectives) -> Table:
    """Latency and bandwidth of each way of each collective at each cap; first what the link allows."""
    columns = [f"us, GB/s at {cap_text(cap)}" for cap in found.caps]
    kinds = dict.fromkeys((fit.kind, fit.implementation) for fit in found.caps[0].fits)
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in kinds):
        wire = ring_wire_bytes(kind, 2**20, 2) / 2**20  # of a byte, that each of two ranks sends
        bounds = [Text(f"{cap.bytes_per_s / wire / 1e9:.3f}") for cap in found.caps]
        rows.append(Row(Text(f"{kind}: the link allows"), bounds))
        for way in (way for other, way in kinds if other == kind):
            fits = [
                next(fit for fit in cap.fits if (fit.kind, fit.implementation) == (kind, way))
                for cap in found.caps
            ]
            rows.append(Row(Text(f"{kind}, {way}"), [Text(fit_text(fit)) for fit in fits]))
    return Table(name="Collectives between two hosts", corner="collective, way", columns=columns, rows=rows)


def overhead_table(found: LinkCollectives) -> Table:
    """Milliseconds of a step beyond that of one rank without communication."""
    caps = [cap for cap in found.caps if cap.points]
    columns = [f"ms at {cap_text(cap)} (overlapped, exposed by the closed form)" for cap in caps]
    rows = [
        Row(
            Text(f"{point.name}: {point.buckets} messages"),
            [Text(overhead_text(next(one for one in cap.points if one.name == point.name))) for cap in caps],
        )
        for point in caps[0].points
    ]
    return Table(name="Overhead of gradients over two hosts", corner="gradients", columns=columns, rows=rows)


def fit_text(fit: Fit) -> str:
    """Latency and bandwidth."""
    rate = f"{fit.bytes_per_s / 1e9:.3f}" if fit.bandwidth_gb_s else "-"
    return f"{fit.latency_us:,.0f}, {rate}"


def overhead_text(point: Point) -> str:
    """Measured, and both closed forms."""
    bounds = f"{written(point.overlapped_ms, '.1f')}, {point.exposed_ms:.1f}"
    return f"{written(point.overhead_ms, '.1f')} ({bounds})"


def cap_text(cap: AtCap) -> str:
    """For a column."""
    return f"{cap.gbit:g} gbit/s" if cap.gbit else "no cap"


def main(rates: tuple[float, ...] = RATES_GBIT) -> int:
    """Measure, and keep it. Returns the exit code."""
    circumstances, caps = here_and_now(), list[AtCap]()
    with TwoHosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for gbit in rates:
            caps.append(measured(hosts, gbit, Path(folder)))
            print(caps[-1], file=sys.stderr, flush=True)
    found = LinkCollectives(circumstances=circumstances, caps=caps)
    write_atomically(DATA, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
