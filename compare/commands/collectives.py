"""`shardpair collectives`: the table of nccl-tests, for each way to send that this machine has."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
from msgspec.structs import replace

from compare.execute import cpu_load
from compare.execute.folders import create_run_dir
from compare.execute.launch import EngineError, run_side, visible_gpus
from compare.execute.launchers import Hosts
from compare.execute.progress import Reporter
from compare.flags import HostFlags, find_pythons, hosts_of
from compare.setup.fitting import require_sides
from compare.setup.presets import check_names
from compare.show.findings import Column, Findings, table_of
from compare.show.terminal import print_findings
from compare.side.collective_bench import (
    IMPLEMENTATIONS,
    KINDS,
    TIMES,
    CollectiveCase,
    CollectiveRequest,
    CollectiveRow,
    CollectiveTimes,
    Kind,
)
from compare.spec.engines.registry import SIDES
from compare.spec.experiment import MAX_CPU_DEVICES, ExperimentError, Layout
from compare.system.json_files import read_json

RANKS = (2, 4, 6)
ORDER = list(IMPLEMENTATIONS)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
FACTOR = 4
"""From one size to the next."""


class Collectives(HostFlags, frozen=True, kw_only=True):
    """Time collectives as nccl-tests does: gloo or NCCL, torch-manual's code over them, and XLA.

    On a CPU all ranks share the cores, so more ranks than cores measure the scheduler, too. The default takes
    about five minutes. The rows are written to collectives.json of each folder in --run_dir, too.

    Try:
      shardpair collectives --kinds all_reduce --ranks 2 --max_size 4M
      shardpair collectives --ranks 2 4 --launcher slurm        # across the hosts of this allocation
    """

    kinds: tuple[Kind, ...] = ()
    """Collectives. permute is a ring of send and receive. Default: all."""
    implementations: tuple[Literal["gloo", "nccl", "ours", "xla"], ...] = ()
    """gloo or nccl: PyTorch's own operation. ours: torch-manual's way over it. xla: shard_map. Default: all
    that the platform has."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks or devices, spread over the hosts. Default: 2 4 6, limited to the GPUs there are and
    to numbers that the hosts divide."""
    min_size: str = "1K"
    """Smallest size in bytes; each is four times the one before. K, M and G are powers of 1024."""
    max_size: str = "64M"
    """Largest size, the total of a gather or scatter."""
    anyway: bool = False
    """Time on a busy machine, too."""

    def __call__(self) -> int:
        """Time and print. Returns 0, or 1 if a result was wrong or a side failed."""
        check_names("--kinds", "collective", self.kinds, KINDS)
        here = implementations_on(self.platform)
        check_names("--implementations", f"way on platform {self.platform}", self.implementations, here)
        sizes = sizes_between(_bytes("--min_size", self.min_size), _bytes("--max_size", self.max_size))
        hosts = hosts_of(self)
        ranks = self.ranks or ranks_on(hosts, self.platform)
        for count in ranks:
            if not 2 <= count <= MAX_CPU_DEVICES or count % hosts.count:
                multiple = f", a multiple of --hosts {hosts.count}" if hosts.count > 1 else ""
                raise ExperimentError(f"--ranks {count}: give 2 to {MAX_CPU_DEVICES}{multiple}")
        ways = {
            side: [way for way in self.implementations or here if IMPLEMENTATIONS[way][0] == side]
            for side in SIDES
        }
        pythons = find_pythons(self)
        cases = tuple(CollectiveCase(kind, size) for kind in self.kinds or KINDS for size in sizes)
        requests = {
            f"{side}-{count}": CollectiveRequest(
                implementations=tuple(names),
                cases=cases,
                ranks=count,
                platform=self.platform,
                timeout_s=self.timeout_s,
            )
            for count in dict.fromkeys(ranks)
            for side, names in ways.items()
            if names
        }
        require_sides([side for side, names in ways.items() if names], pythons)
        before = cpu_load.busy_cores()
        cpu_load.require_idle(before, anyway=self.anyway)
        folder = create_run_dir("collectives", self.run_dir)
        reporter, times, missing = Reporter(quiet=self.quiet), dict[str, CollectiveTimes](), dict[str, str]()
        for name, request in requests.items():
            try:
                with reporter.waits(name):
                    times[name] = time_collectives(request, folder / name, pythons=pythons, hosts=hosts)
            except EngineError as error:
                reporter.failed(error)
                missing[name] = f"did not finish: {error}"
        found = findings_of_times(list(times.values()), missing=missing, busy_cores=before)
        print_findings(replace(found, folder=str(folder)), as_json=self.json)
        return 0 if found.passed else 1


COLUMNS = (
    Column[CollectiveRow]("size (B)", lambda row: row.size, ",d"),
    Column[CollectiveRow]("count", lambda row: row.count, ",d"),
    Column[CollectiveRow]("way", lambda row: row.implementation),
    Column[CollectiveRow]("time (us)", lambda row: row.time_us, ",.1f"),
    Column[CollectiveRow]("algbw (GB/s)", lambda row: row.algbw_gb_s, ".3f"),
    Column[CollectiveRow]("busbw (GB/s)", lambda row: row.busbw_gb_s, ".3f"),
    Column[CollectiveRow](
        "#wrong", lambda row: row.wrong, ",d", news=lambda row: "fail" if row.wrong else ""
    ),
)


def findings_of_times(
    times: Sequence[CollectiveTimes], *, missing: dict[str, str], busy_cores: float
) -> Findings:
    """A table for each collective and number of ranks; `missing` has the sides that failed, and why."""
    rows = sorted(
        (row for side in times for row in side.rows),
        key=lambda row: (row.size, ORDER.index(row.implementation)),
    )
    hosts, ways = {host for side in times for host in side.hosts}, {row.implementation for row in rows}
    over = f" over {len(hosts)} hosts" if len(hosts) > 1 else ""
    tables: dict[tuple[str, int], list[CollectiveRow]] = {
        (kind, ranks): [] for kind in KINDS for ranks in sorted({row.ranks for row in rows})
    }
    for row in rows:
        tables[row.kind, row.ranks].append(row)
    wrong = list(dict.fromkeys(f"{row.implementation} {row.kind}" for row in rows if row.wrong))
    sentence = f"wrong results in {', '.join(wrong)}" if wrong else f"{len(rows)} rows, every result is right"
    used = f"other processes used {busy_cores:.1f} cores before the first row: repeat this on an idle machine"
    return Findings(
        study="collectives",
        title="Collectives",
        sentence=sentence,
        values={"rows": rows, "sides": times},
        passed=not wrong and not missing,
        about=[
            "; ".join(dict.fromkeys(f"{side.device_kind}, {side.threads}" for side in times)),
            "Columns of nccl-tests: size is the total, count the elements of one rank, time the slowest "
            "rank's.",
            "algbw is size / time, busbw the bytes that a rank sends on a ring / time.",
        ],
        warnings=[used] if cpu_load.is_busy(busy_cores, of=psutil.cpu_count() or 1) else [],
        tables=[
            table_of(f"{kind} on {ranks} ranks{over}", COLUMNS, of_table)
            for (kind, ranks), of_table in tables.items()
            if of_table
        ],
        missing=missing,
        notes=[f"{name}: {IMPLEMENTATIONS[name][2]}." for name in ORDER if name in ways],
    )


def implementations_on(platform: str) -> list[str]:
    """Every implementation that a platform has."""
    return [name for name, (_, platforms, _) in IMPLEMENTATIONS.items() if platform in platforms]


def ranks_on(hosts: Hosts, platform: str) -> tuple[int, ...]:
    """The numbers of ranks of `RANKS` that these hosts have devices for; else one or two on all hosts."""
    most = MAX_CPU_DEVICES if platform == "cpu" else visible_gpus()
    if hosts.several:
        most = hosts.count * min(hosts.slots.values(), default=MAX_CPU_DEVICES)
    able = tuple(ranks for ranks in RANKS if not ranks % hosts.count and ranks <= most)
    return able or (max(hosts.count, 2),)


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Sizes in bytes from `smallest` to `largest`, each `FACTOR` times the one before.

    Raises ExperimentError: there are none.
    """
    if not 4 <= smallest <= largest:
        raise ExperimentError(
            f"--min_size {smallest} must be at least 4 bytes, and at most --max_size {largest}"
        )
    sizes = [smallest]
    while sizes[-1] * FACTOR <= largest:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def time_collectives(
    request: CollectiveRequest, folder: Path, *, pythons: Mapping[str, str], hosts: Hosts
) -> CollectiveTimes:
    """Time collectives by their side, in fresh processes, in a new folder. Raises EngineError."""
    side = SIDES[IMPLEMENTATIONS[request.implementations[0]][0]]
    run_side(
        side,
        request,
        folder,
        name=folder.name,
        pythons=pythons,
        layout=Layout(dp_replicate=request.ranks),
        hosts=hosts,
    )
    return read_json(folder / TIMES, CollectiveTimes)


def _bytes(flag: str, text: str) -> int:
    """A size as nccl-tests takes it: 1048576, 1024K or 1M. Raises ExperimentError, naming the flag."""
    found = re.fullmatch(r"(\d{1,15})([KMG]?)B?", text.upper())
    if not found:
        raise ExperimentError(f"{flag} {text}: give bytes, such as 1048576, 1024K, 1M or 1G")
    return int(found[1]) * UNITS[found[2]]
