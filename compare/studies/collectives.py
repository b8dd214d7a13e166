"""`shardpair collectives`: time collectives as nccl-tests does, on every way that this machine has."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from compare.contract.collective_bench import IMPLEMENTATIONS, KINDS, CollectiveRow, Kind
from compare.contract.request import Platform
from compare.execute.hosts import Hosts
from compare.execute.launch import visible_gpus
from compare.execute.load import busy_cores, is_busy, require_idle
from compare.execute.paths import PICTURES, check_output
from compare.flags.arguments import check_timeout
from compare.flags.hosts import HostFlags
from compare.flags.pythons import checked_pythons
from compare.judge.collective_fit import Fit
from compare.judge.outcome import OUTCOME, Outcome, read_outcome
from compare.present.collectives import ORDER, figures_of, in_order, ranks_of, ways_of
from compare.show.figures import save_figures
from compare.show.findings import Column, Findings, table_of
from compare.show.page import leave_page, write_page
from compare.show.terminal import print_findings
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment, ExperimentError
from compare.studies.collective_runs import (
    RANKS,
    Order,
    bench_of,
    requests_of,
    run_requests,
    sizes_between,
)
from compare.studies.presets import check_names
from compare.study import Interrupted
from compare.terminal import errors_console

if TYPE_CHECKING:
    Way = str
else:
    Way = Literal[tuple(IMPLEMENTATIONS)]
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MOST_ROW_S = 60.0


class Collectives(HostFlags, frozen=True, kw_only=True):
    """Time collectives as nccl-tests does, on gloo or NCCL, our way, and XLA; fit latency and bandwidth.

    On CPU all ranks share the cores, so more ranks than cores measure the scheduler, too. The default takes
    about five minutes. `shardpair bench collectives` is the same.

    Try:
      shardpair collectives --kinds all_reduce --ranks 2 --max_size 4M
      shardpair collectives --ranks 2 4 --picture collectives.png
      shardpair collectives --ranks 2 4 --launcher slurm        # across the hosts of this allocation
    """

    kinds: tuple[Kind, ...] = ()
    """Which collectives. permute is a ring of send and receive. Default: all."""
    implementations: tuple[Way, ...] = ()
    """gloo or nccl (PyTorch's stock operation), ours (torch-manual's way over the same), xla (shard_map).
    Default: all that the platform has."""
    ranks: tuple[int, ...] = ()
    """On how many ranks or devices, spread over the hosts. Default: 2 4 6; on GPUs those of them that there
    are, and on several hosts those that they divide."""
    min_size: str = "1K"
    """Smallest size in bytes; K, M, G are powers of 1024, as in nccl-tests."""
    max_size: str = "64M"
    """Largest size, the total of a gather or scatter. What memory cannot hold is left out by name."""
    factor: int = 4
    """From one size to the next."""
    row_s: float = 0.2
    """Seconds that the calls of a row take together, about; there are at least five of them."""
    platform: Platform = "cpu"
    """cpu: gloo ranks of one thread each, and XLA host devices. gpu: one rank or device for each GPU."""
    fault: Kind | Literal[""] = ""
    """Check the checker: falsify one value of this collective's result; #wrong and the exit code say so."""
    anyway: bool = False
    """Time on a busy machine, too; the record then says so."""
    run_dir: str = ""
    """Folder of the results; must not exist. Default: runs/collectives-TIME."""
    picture: Path | None = None
    """Also save the picture of times and bandwidths (.png, .svg, .pdf)."""
    timeout_s: float = 600.0
    """A call that hangs for this long is ended."""
    quiet: bool = False
    """No progress on stderr."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    brief: ClassVar = "collectives by size: gloo or NCCL, our way, and XLA"
    group: ClassVar = "Measure"
    default: ClassVar = "demo"

    def __call__(self, default: Experiment) -> int:
        """Answer it. Returns 0 if every row is there and every result right, else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        try:
            bench, folder = self.outcome()
        except Interrupted as interrupt:
            so_far = read_outcome(interrupt.folder)
            self.shown(so_far, interrupt.folder, picture=self.picture, as_json=self.json)
            raise
        return self.shown(bench, folder, picture=self.picture, as_json=self.json)

    def outcome(self) -> tuple[Outcome, Path]:
        """The rows with their fits, and the folder of the results; nothing is printed on stdout."""
        pythons, order = checked_pythons(self), self.order()
        requests, left_out = requests_of(order)
        busy = busy_cores()
        require_idle(busy, anyway=self.anyway)
        for name, why in left_out.items() if not self.quiet else ():
            errors_console().print(f"left out: {name}: {why}", style="yellow")
        return run_requests(
            requests,
            left_out,
            command=self.command_line(order),
            run_dir=self.run_dir,
            busy=busy,
            pythons=pythons,
            quiet=self.quiet,
            hosts=order.hosts,
        )

    @classmethod
    def shown(cls, outcome: Outcome, folder: Path, *, picture: Path | None, as_json: bool) -> int:
        """Print it, and leave its page. Returns 0 if every row is there and right."""
        found = cls.findings(outcome, folder)
        print_findings(found, as_json=as_json)

        def draw() -> Path:
            if picture and found.figures:
                save_figures(picture, found.figures, columns=2)
            return write_page(folder / "collectives.html", found)

        if found.tables:
            leave_page(draw, as_json=as_json)
        return 0 if found.passed else 1

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each collective and number of ranks, the fits, two figures for each collective."""
        bench = bench_of(outcome)
        kinds = list(dict.fromkeys(row.kind for row in bench.rows))
        hosts = dict.fromkeys(name for side in bench.sides.values() for name in side.hosts)
        over = f" over {len(hosts)} hosts" if len(hosts) > 1 else ""
        groups = [(kind, ranks) for kind in kinds for ranks in ranks_of(bench.rows)]
        tables = [
            table_of(f"{kind} on {ranks} ranks{over}", COLUMNS, rows)
            for kind, ranks in groups
            if (rows := in_order(row for row in bench.rows if (row.kind, row.ranks) == (kind, ranks)))
        ]
        fits = sorted(bench.fits, key=lambda fit: (fit.kind, fit.ranks, ORDER.index(fit.implementation)))
        if fits:
            tables.append(table_of("time = latency + size / bandwidth, fitted", FIT_COLUMNS, fits))
        sides = bench.sides.values()
        devices = dict.fromkeys(f"{side.device_kind}, {side.threads}" for side in sides)
        versions = (f"{name} {version}" for name, version in outcome.circumstances.versions.items())
        return Findings(
            title="Collectives: latency and bandwidth",
            sentence=bench.sentence(),
            value={"rows": bench.rows, "fits": bench.fits, "warnings": _busy(outcome), "result": outcome},
            passed=bench.passed,
            about=[
                f"{'; '.join(devices)} {', '.join(versions)}",
                *([f"The ranks are spread evenly over {', '.join(hosts)}."] if over else []),
                "Columns of nccl-tests: size is the total, count one rank's elements, the time that of the "
                "slowest rank; busbw is what a rank sends on a ring over that time. On a CPU ranks share "
                "the cores.",
            ],
            warnings=_busy(outcome),
            tables=tables,
            figures=[figure for kind in kinds for figure in figures_of(bench.rows, kind)],
            notes=[
                *(f"{name}: {IMPLEMENTATIONS[name].description}." for name in ways_of(bench.rows)),
                *dict.fromkeys(f"{note}." for side in sides for note in side.notes),
                "Each time weighs by its own size in the fit; misfit is the median distance of a time from "
                "the line.",
            ],
            left_out=outcome.left_out,
            command=outcome.line,
            source=f"{outcome.circumstances.words} Every single figure is in {OUTCOME}, beside this page.",
        )

    def order(self) -> Order:
        """What is asked for, checked. Raises ExperimentError."""
        check_names("--kinds", "collective", self.kinds, KINDS)
        here = [name for name, one in IMPLEMENTATIONS.items() if self.platform in one.platforms]
        check_names("--implementations", f"way on platform {self.platform}", self.implementations, here)
        if not 0 < self.row_s <= MOST_ROW_S:
            raise ExperimentError(f"--row_s {self.row_s} must be more than 0 and at most {MOST_ROW_S:g}")
        check_timeout(self.timeout_s)
        kinds, hosts = self.kinds or KINDS, self.found_hosts()
        if self.fault and self.fault not in kinds:
            raise ExperimentError(f"--fault {self.fault} has no effect: it is not among --kinds")
        return Order(
            kinds=kinds,
            implementations=self.implementations or tuple(here),
            sizes=sizes_between(
                _bytes("--min_size", self.min_size), _bytes("--max_size", self.max_size), self.factor
            ),
            ranks=self._ranks(hosts),
            platform=self.platform,
            row_s=self.row_s,
            timeout_s=self.timeout_s,
            fault=self.fault,
            hosts=hosts,
        )

    def _ranks(self, hosts: Hosts) -> tuple[int, ...]:
        if len(set(self.ranks)) < len(self.ranks):
            raise ExperimentError(f"--ranks {' '.join(map(str, self.ranks))}: give each number once")
        if self.ranks:
            return self.ranks
        if hosts.several:
            most = hosts.count * min(hosts.slots.values(), default=MAX_CPU_DEVICES)
            fitting = (ranks for ranks in RANKS if not ranks % hosts.count and ranks <= most)
            return tuple(fitting) or (hosts.count,)
        if self.platform == "cpu":
            return RANKS
        return tuple(ranks for ranks in RANKS if ranks <= visible_gpus()) or RANKS[:1]

    def command_line(self, order: Order) -> str:
        """The command that asks for an order, every flag spelled out."""
        asked = {name: getattr(order, name) for name in ("kinds", "implementations", "ranks")}
        asked |= {name: (getattr(self, name),) for name in ("min_size", "max_size", "factor", "row_s")}
        asked |= {"platform": (self.platform,), **({"fault": (self.fault,)} if self.fault else {})}
        if order.hosts.several:
            asked |= {"launcher": (self.launcher,), "hosts": (order.hosts.count,)}
            asked |= {"hostfile": (self.hostfile,)} if self.hostfile else {}
        words = [word for flag, values in asked.items() for word in (f"--{flag}", *map(str, values))]
        return shlex.join(["shardpair", "collectives", *words])


def _bytes(flag: str, text: str) -> int:
    """A size as nccl-tests takes it: 1048576, 1024K or 1M. Raises ExperimentError, naming the flag."""
    found = re.fullmatch(r"(\d{1,15})([KMG]?)B?", text.upper())
    if not found:
        raise ExperimentError(f"{flag} {text}: give bytes, such as 1048576, 1024K, 1M or 1G")
    return int(found[1]) * UNITS[found[2]]


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


def _busy(outcome: Outcome) -> list[str]:
    cores = max(outcome.circumstances.busy_cores, default=0.0)
    if not is_busy(cores):
        return []
    return [f"other processes used {cores:.1f} cores when the first row was timed: no time holds"]
