"""The rows of `shardpair collectives`: each side times its own, in fresh processes; saved after each."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, field

from compare.contract.collective_bench import (
    IMPLEMENTATIONS,
    ROWS,
    SIDE,
    CollectiveCase,
    CollectiveRequest,
    CollectiveRow,
    CollectiveSide,
    Kind,
    bytes_held,
)
from compare.contract.request import REQUEST, Platform
from compare.contract.run_lock import lock_folder
from compare.execute.hosts import HERE, Hosts
from compare.execute.launch import EngineError, require_gpu, run_side
from compare.execute.machine import free_memory_bytes, gpu_memory_bytes, here_and_now
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.execute.tally import Tally
from compare.host.json_files import FolderName, read_json, read_own_bytes, write_json
from compare.host.tensors import RecordError
from compare.judge.collective_fit import Fit, fits_of
from compare.judge.outcome import OUTCOME, Outcome, save
from compare.spec.engines.registry import SIDES
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment, ExperimentError, Layout
from compare.study import Interrupted
from compare.terminal import human_bytes

RANKS = (2, 4, 6)


class CollectiveBench(Struct, frozen=True, kw_only=True):
    """The rows so far, with their fits."""

    requests: dict[FolderName, CollectiveRequest]
    """By the folder in which each ran."""
    rows: list[CollectiveRow] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    sides: dict[str, CollectiveSide] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Why a folder has not all of its rows."""

    @property
    def wrong(self) -> int:
        """Elements that were not what they should be, over all rows."""
        return sum(row.wrong for row in self.rows)

    @property
    def passed(self) -> bool:
        """True if every row that was asked for is there, and right."""
        return not self.failures and not self.wrong and bool(self.rows)

    def sentence(self) -> str:
        """The outcome in a line."""
        if self.failures:
            return f"did not finish: {'; '.join(self.failures.values())}"
        if self.wrong:
            bad = dict.fromkeys(f"{row.implementation} {row.kind}" for row in self.rows if row.wrong)
            return f"wrong results: {self.wrong:,} elements in {', '.join(bad)}"
        return f"{len(self.rows)} rows, every element of every result as it should be"


class Order(Struct, frozen=True, kw_only=True):
    """A benchmark asked for."""

    kinds: tuple[Kind, ...]
    implementations: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    platform: Platform = "cpu"
    row_s: float = 0.2
    timeout_s: float = 600.0
    fault: str = ""
    hosts: Hosts = HERE


def bench_of(outcome: Outcome) -> CollectiveBench:
    """The rows of a `shardpair collectives`. Raises RecordError: they are garbled."""
    try:
        return msgspec.convert(outcome.more.get("bench"), CollectiveBench)
    except msgspec.ValidationError as error:
        raise RecordError(f"{OUTCOME} is garbled: {error}") from None


def sizes_between(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Sizes from `smallest` up to `largest`, each `factor` times the last one. Raises ExperimentError."""
    if smallest < 4 or largest < smallest:
        raise ExperimentError(
            f"--min_size {smallest} and --max_size {largest}: sizes begin with 4 bytes, and the largest is "
            f"not below the smallest"
        )
    if factor < 2:
        raise ExperimentError(f"--factor {factor} must be at least 2")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def requests_of(order: Order) -> tuple[dict[str, CollectiveRequest], dict[str, str]]:
    """A request for each side and number of ranks, by folder; and what memory leaves out, with the reason.

    Every host is taken to have as much memory as this one.

    Raises:
        ExperimentError: too few or too many ranks, hosts that do not divide them, or nothing fits into
            memory.
        EnvironmentMissing: platform gpu without one.
    """
    _require_devices(order)
    memory = (gpu_memory_bytes() or free_memory_bytes()) if order.platform == "gpu" else free_memory_bytes()
    requests, left_out = {}, {}
    for ranks in order.ranks:
        share = ranks if order.platform == "gpu" else order.hosts.count  # each GPU has its own memory
        fits = [
            CollectiveCase(kind, size)
            for kind in order.kinds
            for size in order.sizes
            if bytes_held(kind, size, ranks) / share <= memory
        ]
        left_out |= _left_out(order, ranks, fits, share, memory)
        for side in SIDES if fits else ():
            mine = tuple(name for name in order.implementations if IMPLEMENTATIONS[name].side == side)
            if mine:
                requests[f"{side}-{ranks}"] = CollectiveRequest(
                    implementations=mine,
                    cases=tuple(fits),
                    ranks=ranks,
                    platform=order.platform,
                    row_s=order.row_s,
                    timeout_s=order.timeout_s,
                    fault=order.fault,
                )
    if not requests:
        why = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ExperimentError(f"nothing is left to time: {why}")
    return requests, left_out


def run_requests(
    requests: Mapping[str, CollectiveRequest],
    left_out: Mapping[str, str],
    *,
    command: str,
    run_dir: str,
    busy: float,
    pythons: Mapping[str, str],
    quiet: bool,
    hosts: Hosts = HERE,
) -> tuple[Outcome, Path]:
    """Run every request in fresh processes, one after another; the outcome is saved after each.

    Args:
        requests, left_out: from `requests_of`.
        command: that asks for them.
        run_dir: folder of the results, which must not exist; '' names one.
        busy: cores in use by others.
        pythons: side -> its interpreter.
        quiet: no progress on stderr.
        hosts: over which the ranks of each are spread.

    Returns:
        The outcome, and its folder.

    Raises:
        Interrupted: Ctrl-C. Finished rows are saved.
    """
    bench = CollectiveBench(requests=dict(requests))
    outcome = Outcome(
        study="collectives",
        name="collectives",
        line=command,
        experiment=Experiment(),
        circumstances=here_and_now(busy),
        platform=next(iter(requests.values())).platform,
        left_out=dict(left_out),
    )
    tally = Tally(sum(map(_rows_asked_for, requests.values())), "rows", quiet=quiet)
    folder = create_run_dir("collectives", run_dir)

    def keep(bench: CollectiveBench) -> Outcome:
        versions = {name: version for side in bench.sides.values() for name, version in side.versions.items()}
        now = msgspec.structs.replace(outcome.circumstances, versions=versions)
        more = {"bench": msgspec.to_builtins(bench)}
        kept = msgspec.structs.replace(outcome, circumstances=now, more=more)
        save(kept, folder)
        return kept

    with lock_folder(folder):
        kept = keep(bench)
        for name, request in requests.items():
            try:
                _time(name, request, folder / name, tally=tally, pythons=pythons, hosts=hosts)
                bench = _collected(bench, folder)
            except EngineError as error:
                Reporter(quiet=quiet).failed(error)
                bench = _collected(bench, folder, {name: str(error)})
            except KeyboardInterrupt:
                bench = _collected(bench, folder, {name: f"{name}: interrupted"})
                keep(bench)
                said = f"{len(bench.rows)} finished rows are kept in {folder / OUTCOME}"
                raise Interrupted(f"interrupted; every process was ended. {said}", folder) from None
            kept = keep(bench)
    return kept, folder


def _time(
    name: str,
    request: CollectiveRequest,
    folder: Path,
    *,
    tally: Tally,
    pythons: Mapping[str, str],
    hosts: Hosts,
) -> None:
    """Run a side on a number of ranks, which writes row after row. Raises EngineError."""
    folder.mkdir()
    write_json(folder / REQUEST, request)
    ways = " and ".join(request.implementations)
    with tally.part(f"{ways} on {request.ranks} ranks", lambda: len(_rows(folder))):
        run_side(
            SIDES[IMPLEMENTATIONS[request.implementations[0]].side],
            folder,
            name=name,
            platform=request.platform,
            timeout_s=request.timeout_s,
            options=["--collectives"],
            pythons=pythons,
            layout=_layout(request.ranks),
            hosts=hosts,
        )


def _collected(
    bench: CollectiveBench, folder: Path, failures: Mapping[str, str] | None = None
) -> CollectiveBench:
    """The benchmark with all rows that are there by now, and with more failures."""
    rows = [row for name in bench.requests for row in _rows(folder / name)]
    sides = {
        name: read_json(folder / name / SIDE, CollectiveSide)
        for name in bench.requests
        if (folder / name / SIDE).is_file()
    }
    more = bench.failures | dict(failures or {})
    return msgspec.structs.replace(bench, rows=rows, fits=fits_of(rows), sides=sides, failures=more)


def _rows(folder: Path) -> list[CollectiveRow]:
    """The rows of a folder that are whole."""
    path = folder / ROWS
    lines: Iterable[bytes] = read_own_bytes(path).split(b"\n")[:-1] if path.exists() else ()
    return [msgspec.json.decode(line, type=CollectiveRow) for line in lines]


def _rows_asked_for(request: CollectiveRequest) -> int:
    return len(request.cases) * len(request.implementations)


def _layout(ranks: int) -> Layout:
    """Ranks along one axis."""
    return Layout(dp_replicate=ranks)


def _require_devices(order: Order) -> None:
    for ranks in order.ranks:
        if not 2 <= ranks <= MAX_CPU_DEVICES:
            raise ExperimentError(f"--ranks {ranks}: give between 2 and {MAX_CPU_DEVICES}")
        if ranks % order.hosts.count:
            raise ExperimentError(f"--ranks {ranks}: {order.hosts.count} hosts do not divide them")
        order.hosts.require(_layout(ranks))  # a host's slots
    if order.hosts.launcher != "local":  # its hosts have the GPUs, and not this one
        return
    if order.platform == "gpu" and (gpus := require_gpu()) < max(order.ranks):
        raise ExperimentError(
            f"--ranks {max(order.ranks)}: {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and each rank "
            f"needs one of its own: lower --ranks, or use --platform cpu"
        )


def _left_out(
    order: Order, ranks: int, fits: list[CollectiveCase], share: int, memory: int
) -> dict[str, str]:
    """Each kind that loses sizes, from which on, and why."""
    lost = {
        kind: next((size for size in order.sizes if CollectiveCase(kind, size) not in fits), 0)
        for kind in order.kinds
    }
    return {
        f"{kind} on {ranks} ranks from {size:,} bytes on": f"it needs "
        f"{human_bytes(bytes_held(kind, size, ranks) / share)}, and {human_bytes(memory)} are free"
        for kind, size in lost.items()
        if size
    }
