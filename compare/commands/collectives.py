"""`shardpair collectives`: time collectives as nccl-tests does, on every way that this machine has."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from compare.commands.arguments import check_timeout
from compare.commands.pythons import SidePythons, checked_pythons
from compare.contract.collective_bench import IMPLEMENTATIONS, KINDS, Kind
from compare.contract.request import Platform
from compare.execute.launch import visible_gpus
from compare.execute.load import busy_cores, require_idle
from compare.execute.paths import PICTURES, check_output
from compare.present.collectives import findings_of_bench
from compare.show.page import show as show_findings
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.collectives import (
    RANKS,
    CollectiveBench,
    Interrupted,
    Order,
    read_bench,
    requests_of,
    run_requests,
    sizes_between,
)
from compare.studies.presets import check_names
from compare.terminal.console import errors_console

if TYPE_CHECKING:
    Way = str
else:
    Way = Literal[tuple(IMPLEMENTATIONS)]
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MOST_ROW_S = 60.0


class Collectives(SidePythons, frozen=True, kw_only=True):
    """Time collectives as nccl-tests does, on gloo or NCCL, our way, and XLA; fit latency and bandwidth.

    On CPU all ranks share the cores, so more ranks than cores measure the scheduler, too. The default takes
    about five minutes. `shardpair bench collectives` is the same.

    Try:
      shardpair collectives --kinds all_reduce --ranks 2 --max_size 4M
      shardpair collectives --ranks 2 4 --picture collectives.png
    """

    kinds: tuple[Kind, ...] = ()
    """Which collectives. permute is a ring of send and receive. Default: all."""
    implementations: tuple[Way, ...] = ()
    """gloo or nccl (PyTorch's stock operation), ours (torch-manual's way over the same), xla (shard_map).
    Default: all that the platform has."""
    ranks: tuple[int, ...] = ()
    """On how many ranks or devices. Default: 2 4 6; on GPUs those of them that there are."""
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

    def __call__(self, default: Experiment) -> int:
        """Time them. Returns 0 if every row is there and every result right, else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        try:
            bench, folder = self.outcome()
        except Interrupted as interrupt:
            bench = read_bench(interrupt.folder)
            show(bench, interrupt.folder, picture=self.picture, as_json=self.json)
            raise
        return show(bench, folder, picture=self.picture, as_json=self.json)

    def outcome(self) -> tuple[CollectiveBench, Path]:
        """Time them; nothing is printed on stdout.

        Returns:
            The rows with their fits, and the folder of the results.
        """
        pythons = checked_pythons(self)
        order = self.order()
        requests, left_out = requests_of(order)
        busy = busy_cores()
        require_idle(busy, anyway=self.anyway)
        if not self.quiet:
            for line in left_out:
                errors_console().print(f"left out: {line}", style="yellow")
        return run_requests(
            requests,
            left_out,
            command=command_line(order, factor=self.factor),
            run_dir=self.run_dir,
            busy=busy,
            pythons=pythons,
            quiet=self.quiet,
        )

    def order(self) -> Order:
        """What is asked for, checked. Raises ExperimentError."""
        check_names("--kinds", "collective", self.kinds, KINDS)
        here = [name for name, one in IMPLEMENTATIONS.items() if self.platform in one.platforms]
        check_names("--implementations", f"way on platform {self.platform}", self.implementations, here)
        if not 0 < self.row_s <= MOST_ROW_S:
            raise ExperimentError(f"--row_s {self.row_s} must be more than 0 and at most {MOST_ROW_S:g}")
        check_timeout(self.timeout_s)
        kinds = self.kinds or KINDS
        if self.fault and self.fault not in kinds:
            raise ExperimentError(f"--fault {self.fault} has no effect: it is not among --kinds")
        return Order(
            kinds=kinds,
            implementations=self.implementations or tuple(here),
            sizes=sizes_between(
                _bytes("--min_size", self.min_size), _bytes("--max_size", self.max_size), self.factor
            ),
            ranks=self._ranks(),
            platform=self.platform,
            row_s=self.row_s,
            timeout_s=self.timeout_s,
            fault=self.fault,
        )

    def _ranks(self) -> tuple[int, ...]:
        if len(set(self.ranks)) < len(self.ranks):
            raise ExperimentError(f"--ranks {' '.join(map(str, self.ranks))}: give each number once")
        if self.ranks or self.platform == "cpu":
            return self.ranks or RANKS
        return tuple(ranks for ranks in RANKS if ranks <= visible_gpus()) or RANKS[:1]


def command_line(order: Order, *, factor: int) -> str:
    """The command that asks for this, every flag spelled out."""
    flags: dict[str, Iterable[object]] = {
        "kinds": order.kinds,
        "implementations": order.implementations,
        "ranks": order.ranks,
        "min_size": [order.sizes[0]],
        "max_size": [order.sizes[-1]],
        "factor": [factor],
        "row_s": [order.row_s],
        "platform": [order.platform],
        **({"fault": [order.fault]} if order.fault else {}),
    }
    words = [word for flag, values in flags.items() for word in (f"--{flag}", *map(str, values))]
    return shlex.join(["shardpair", "collectives", *words])


def _bytes(flag: str, text: str) -> int:
    """A size as nccl-tests takes it: 1048576, 1024K or 1M. Raises ExperimentError, naming the flag."""
    found = re.fullmatch(r"(\d{1,15})([KMG]?)B?", text.upper())
    if not found:
        raise ExperimentError(f"{flag} {text}: give bytes, such as 1048576, 1024K, 1M or 1G")
    return int(found[1]) * UNITS[found[2]]


def show(bench: CollectiveBench, folder: Path, *, picture: Path | None, as_json: bool) -> int:
    """Print it, and leave its page and its picture. Returns 0 if every result is there and right, else 1."""
    found = findings_of_bench(bench)
    return show_findings(found, folder, page="collectives.html", picture=picture, as_json=as_json)
