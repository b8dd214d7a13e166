"""`shardpair collectives`: time collectives as nccl-tests does, in every way that this machine has."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from compare.commands.bench.timed_study import OnIdle
from compare.commands.collectives.fit import Fit, fits_of
from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.execute.launch import run_side, visible_gpus
from compare.execute.launchers import Hosts
from compare.execute.load import is_busy
from compare.flags import Hidden, checked_pythons
from compare.judge.outcome import Case, Grid, Outcome
from compare.setup.presets import check_names
from compare.show.findings import Column, Findings, findings_of, table_of
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
from compare.spec.engines.registry import JAX, SIDES, TORCH
from compare.spec.experiment import (
    MAX_CPU_DEVICES,
    Checkpoints,
    Data,
    Experiment,
    ExperimentError,
    Layout,
    Model,
    Optimizer,
    Precision,
    Train,
    edited,
)
from compare.system.json_files import read_json

RANKS = (2, 4, 6)
ORDER = list(IMPLEMENTATIONS)
ENGINE = {JAX.name: "jax-manual", TORCH.name: "torch-manual"}
"""By side: whose way of sending is timed."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
FACTOR = 4
"""From one size to the next."""


class Collectives(OnIdle, frozen=True, kw_only=True):
    """Time collectives as nccl-tests does, on gloo or NCCL, our way, and XLA; fit latency and bandwidth.

    On CPU all ranks share the cores, so more ranks than cores measure the scheduler, too. The default takes
    about five minutes.

    Try:
      shardpair collectives --kinds all_reduce --ranks 2 --max_size 4M
      shardpair collectives --ranks 2 4 --launcher slurm        # across the hosts of this allocation
    """

    kinds: tuple[Kind, ...] = ()
    """Which collectives. permute is a ring of send and receive. Default: all."""
    implementations: tuple[Literal["gloo", "nccl", "ours", "xla"], ...] = ()
    """gloo or nccl (PyTorch's stock operation), ours (torch-manual's way over the same), xla (shard_map).
    Default: all that the platform has."""
    ranks: tuple[int, ...] = ()
    """On how many ranks or devices, spread over the hosts. Default: 2 4 6; on GPUs those of them that there
    are, and on several hosts those that they divide."""
    min_size: str = "1K"
    """Smallest size in bytes, of which each is four times the last; K, M, G are powers of 1024."""
    max_size: str = "64M"
    """Largest size, the total of a gather or scatter."""

    experiment: Hidden[str] = "demo"
    model: Hidden[Model] = Model()
    data: Hidden[Data] = Data()
    optimizer: Hidden[Optimizer] = Optimizer()
    train: Hidden[Train] = Train()
    precision: Hidden[Precision] = Precision()
    layout: Hidden[Layout] = Layout()
    checkpoint: Hidden[Checkpoints] = Checkpoints()
    init_from: Hidden[str] = ""
    cache_dir: Hidden[str] = ""

    brief: ClassVar = "collectives by size: gloo or NCCL, our way, and XLA"
    trains: ClassVar = False

    @property
    def title(self) -> str:
        """Of its folder."""
        return self.command

    def cases(self, experiment: Experiment) -> Grid:
        """A process for each side and number of ranks. Raises ExperimentError."""
        check_names("--kinds", "collective", self.kinds, KINDS)
        here = implementations_on(self.platform)
        check_names("--implementations", f"way on platform {self.platform}", self.implementations, here)
        self._sizes()
        hosts, cases = self.found_hosts(), {}
        for ranks in self._ranks(hosts):
            if not 2 <= ranks <= MAX_CPU_DEVICES or ranks % hosts.count:
                raise ExperimentError(
                    f"--ranks {ranks}: give between 2 and {MAX_CPU_DEVICES}, which {hosts.count} hosts divide"
                )
            batch = {"batch_size": ranks, "gradient_accumulation_steps": 1}
            spread = edited(experiment, {"train": batch, "layout": {"dp_replicate": ranks}})
            for side, engine in ENGINE.items():
                if self._ways(side):
                    request = Request(engine=engine, experiment=spread)
                    cases[f"{side}-{ranks}"] = Case(request=request, layout=f"{ranks} ranks")
        return cases, {}

    def measured(
        self, name: str, case: Case, place: Path, number: int, tell: Callable[[Step], None]
    ) -> tuple[CollectiveTimes, Record | None]:
        """A side's rows on a number of ranks. Raises EngineError."""
        request = CollectiveRequest(
            implementations=self._ways(case.products.split()[0]),
            cases=tuple(CollectiveCase(kind, size) for kind in self.kinds or KINDS for size in self._sizes()),
            ranks=case.experiment.layout.devices,
            platform=self.platform,
            timeout_s=self.timeout_s,
        )
        return time_collectives(request, place, pythons=checked_pythons(self), hosts=self.found_hosts()), None

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each collective and number of ranks, and the fits."""
        sides = outcome.values(CollectiveTimes).values()
        rows = [row for side in sides for row in side.rows]
        rows.sort(key=lambda row: (row.size, ORDER.index(row.implementation)))
        kinds, ways = dict.fromkeys(row.kind for row in rows), {row.implementation for row in rows}
        hosts = {host for side in sides for host in side.hosts}
        over = f" over {len(hosts)} hosts" if len(hosts) > 1 else ""
        tables = [
            table_of(f"{kind} on {ranks} ranks{over}", COLUMNS, of_table)
            for kind in kinds
            for ranks in sorted({row.ranks for row in rows})
            if (of_table := [row for row in rows if (row.kind, row.ranks) == (kind, ranks)])
        ]
        fits = sorted(fits_of(rows), key=lambda fit: (fit.kind, fit.ranks, ORDER.index(fit.implementation)))
        if fits:
            tables.append(table_of("time = latency + size / bandwidth, fitted", FIT_COLUMNS, fits))
        wrong = {f"{row.implementation} {row.kind}": row.wrong for row in rows if row.wrong}
        sentence = f"{len(rows)} rows, every element of every result as it should be"
        cores = max(outcome.circumstances.busy_cores, default=0.0)
        used = f"other processes used {cores:.1f} cores when the first row was timed: no time holds"
        return findings_of(
            outcome,
            title="Collectives: latency and bandwidth",
            sentence=f"wrong results in {', '.join(wrong)}" if wrong else sentence,
            rows=rows,
            value={"fits": fits},
            passed=not wrong,
            about=[
                "; ".join(dict.fromkeys(f"{side.device_kind}, {side.threads}" for side in sides)),
                "Columns of nccl-tests: size is the total, count one rank's elements, the time that of the "
                "slowest rank; busbw is what a rank sends on a ring over that time. On a CPU ranks share "
                "the cores.",
            ],
            warnings=[used] if is_busy(cores) else [],
            tables=tables,
            notes=[
                *(f"{name}: {IMPLEMENTATIONS[name][2]}." for name in ORDER if name in ways),
                "Each time weighs by its own size in the fit; misfit is the median distance of a time from "
                "the line.",
            ],
        )

    def _ways(self, side: str) -> tuple[str, ...]:
        """Implementations of a side that are asked for."""
        asked = self.implementations or implementations_on(self.platform)
        return tuple(name for name in asked if IMPLEMENTATIONS[name][0] == side)

    def _sizes(self) -> list[int]:
        """Bytes. Raises ExperimentError."""
        smallest, largest = _bytes("--min_size", self.min_size), _bytes("--max_size", self.max_size)
        if not 4 <= smallest <= largest:
            raise ExperimentError(
                f"--min_size {self.min_size} and --max_size {self.max_size}: sizes begin with 4 bytes, and "
                f"the largest is not below the smallest"
            )
        return sizes_between(smallest, largest)

    def _ranks(self, hosts: Hosts) -> tuple[int, ...]:
        """Numbers of ranks, each once."""
        most = MAX_CPU_DEVICES if self.platform == "cpu" else visible_gpus()
        if hosts.several:
            most = hosts.count * min(hosts.slots.values(), default=MAX_CPU_DEVICES)
        able = (ranks for ranks in RANKS if not ranks % hosts.count and ranks <= most)
        return tuple(dict.fromkeys(self.ranks or able)) or (max(hosts.count, 2),)


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
FIT_COLUMNS = (
    Column[Fit]("collective", lambda fit: fit.kind),
    Column[Fit]("ranks", lambda fit: fit.ranks, "d"),
    Column[Fit]("way", lambda fit: fit.implementation),
    Column[Fit]("latency (us)", lambda fit: fit.latency_us, ",.1f"),
    Column[Fit]("bandwidth (GB/s)", lambda fit: fit.bandwidth_gb_s, ".3f"),
    Column[Fit]("misfit", lambda fit: fit.misfit, ".0%"),
)


def implementations_on(platform: str) -> list[str]:
    """Every implementation that a platform has."""
    return [name for name, (_, platforms, _) in IMPLEMENTATIONS.items() if platform in platforms]


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Sizes from `smallest` up to `largest`, each `FACTOR` times the last one."""
    sizes = [smallest]
    while sizes[-1] * FACTOR <= largest:
        sizes.append(sizes[-1] * FACTOR)
    return sizes


def time_collectives(
    request: CollectiveRequest, folder: Path, *, pythons: Mapping[str, str], hosts: Hosts
) -> CollectiveTimes:
    """Time collectives by their side, in fresh processes, in a folder that is made. Raises EngineError."""
    side = SIDES[IMPLEMENTATIONS[request.implementations[0]][0]]
    run_side(
        side,
        request,
        folder,
        name=folder.name,
        options=["--collectives"],
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
