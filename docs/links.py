"""`make links`: strategies over a capped link between two hosts; docs/data/links.json and docs/links.png.

    python docs/links.py                    # everything, on an idle machine: a quarter of an hour
    python docs/links.py ddp tp --once      # cases by the beginning of their names, printed and not kept

Two hosts are network namespaces, each with a name and an address, on a bridge (`link_hosts`: needs root and
iproute2). A case is one run of one engine; while it trains, the cap on both directions of the link changes,
from none to the slowest and back, so that what drifts is the same for all. A step during which the cap
changed is not counted. What the hosts' interfaces sent is read beside the ledger.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from link_hosts import RATES_GBIT, TwoHosts
from msgspec import Struct

from compare.contract import record as files
from compare.contract.record import STEPS, STEPS_PART, Record, read_record, read_steps
from compare.contract.request import Request
from compare.execute.here import here_and_now
from compare.execute.launch import child_environment
from compare.host.disk import write_atomically
from compare.host.tensors import RecordError
from compare.judge.circumstances import Circumstances
from compare.spec.engines.registry import ENGINES, side_of
from compare.spec.experiment import Experiment, edited, load

DATA = Path(__file__).parent / "data" / "links.json"
ENGINES_SHOWN = ("torch-manual", "torch-library", "jax-manual", "jax-compiler")
MANUAL = ("torch-manual", "jax-manual")
FIRST, COUNTED, MOST = 4, 6, 80
"""Steps before the first cap, steps that count at each, and steps of a run."""
PATIENCE_S = 240.0
POLL_S = 0.002


class Case(Struct, frozen=True, kw_only=True):
    """A strategy, and who runs it."""

    name: str
    layout: dict[str, object]
    engines: tuple[str, ...] = ENGINES_SHOWN


def _ddp(sync: str, engines: tuple[str, ...] = MANUAL) -> Case:
    layout = {"dp_replicate": 2, "gradient_sync": sync, "bucket_mb": 0.5}
    return Case(name=f"ddp {sync}", layout=layout, engines=engines)


PIPELINE = {"pp": 2, "microbatches": 4, "schedule": "1f1b"}
CASES = (
    *map(_ddp, ("naive", "flat")),
    _ddp("overlapped", ("torch-manual",)),
    _ddp("bucketed", ENGINES_SHOWN),
    Case(name="1f1b", layout=PIPELINE, engines=("torch-manual", "torch-library", "jax-manual")),
    Case(name="gpipe", layout=PIPELINE | {"schedule": "gpipe"}, engines=("jax-compiler",)),
    Case(name="fsdp 4", layout={"dp_shard": 4, "zero": 3}),
    Case(name="hsdp 2 x 2", layout={"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    Case(name="tp 4", layout={"tp": 4}),
    Case(name="dp 2 x tp 2", layout={"dp_replicate": 2, "tp": 2}),
)


class Link(Struct, frozen=True, kw_only=True):
    """The link at one cap, as a program sees it."""

    gbit: float
    """The cap; 0 for none."""
    bytes_per_s: float
    """Of one stream."""
    latency_s: float
    """Half of a round trip."""


class AtRate(Struct, frozen=True, kw_only=True):
    """Steps at one cap."""

    gbit: float
    step_ms: float
    """Median."""
    low_ms: float
    high_ms: float
    """Quartiles."""
    steps: int


class LinkRow(Struct, frozen=True, kw_only=True):
    """One case on one engine."""

    case: str
    engine: str
    devices: int
    crossing_bytes: int
    """That the ledger says all devices send to the other host in a step."""
    sent_bytes: float
    """That both hosts' interfaces sent for a step, headers included."""
    rates: list[AtRate]
    """The first is without a cap."""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.case}, {self.engine}"


class Links(Struct, frozen=True, kw_only=True):
    """All of it."""

    circumstances: Circumstances
    links: list[Link]
    rows: list[LinkRow]
    missing: dict[str, str] = {}
    """Why a case on an engine has no row."""


def read_links() -> Links | None:
    """What is kept; None before the first `make links`."""
    return msgspec.json.decode(DATA.read_bytes(), type=Links) if DATA.is_file() else None


def experiment_of(case: Case) -> Experiment:
    """nanoGPT's recipe for a CPU, 0.8 M parameters in float32, under the case's layout."""
    train = {"batch_size": 16, "eval_interval": 0, "max_iters": MOST}
    return edited(load("cpu"), {"data": {"source": "synthetic"}, "train": train, "layout": case.layout})


def measured(case: Case, engine: str, hosts: TwoHosts, folder: Path, rates: Sequence[float]) -> LinkRow:
    """Train once, while the cap goes through `rates`.

    Raises:
        RuntimeError: a process failed, or the run was over before all caps had their steps.
    """
    experiment, side = experiment_of(case), side_of(engine)
    folder.mkdir(parents=True)
    files.write_json(
        folder / files.REQUEST, Request(engine=engine, experiment=experiment, timeout_s=PATIENCE_S)
    )
    on_host = experiment.layout.devices // 2 if side.one_process_a_device else 1
    hosts.cap(0)
    command = [sys.executable, "-m", side.name, str(folder)]
    processes = hosts.start(command, on_host, folder, environment=child_environment(side, "cpu"))
    with contextlib.ExitStack() as ends:
        for process in processes:
            ends.callback(process.wait)
            ends.callback(process.kill)
        spans, sent = _through_rates(hosts, processes, folder, rates)
        for process in processes:
            process.wait(PATIENCE_S)
            _require_alive(process, folder)
    return _row(case, engine, read_record(folder), spans, sent)


def _through_rates(
    hosts: TwoHosts, processes: Sequence[subprocess.Popen], folder: Path, rates: Sequence[float]
) -> tuple[list[tuple[float, int, int]], float]:
    """Caps with the first and the last step that count at each, and bytes a step on the interfaces."""
    spans, begin, sent_before = list[tuple[float, int, int]](), _wait(FIRST, processes, folder), hosts.sent()
    first = begin
    for gbit in rates:
        hosts.cap(gbit)
        after = _done(folder) + 1  # the step that is under way had two caps
        done = _wait(after + COUNTED, processes, folder)
        spans.append((gbit, after, done))
    sent = (hosts.sent() - sent_before) / max(_done(folder) - first, 1)
    hosts.cap(0)
    return spans, sent


def _wait(steps: int, processes: Sequence[subprocess.Popen], folder: Path) -> int:
    """Wait until so many steps are done. Returns how many are."""
    if steps > MOST:
        raise RuntimeError(f"{folder.name}: {MOST} steps are too few")
    deadline = time.monotonic() + PATIENCE_S
    while (done := _done(folder)) < steps:
        for process in processes:
            _require_alive(process, folder)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder.name}: {done} of {steps} steps in {PATIENCE_S:g} s")
        time.sleep(POLL_S)
    return done


def _done(folder: Path) -> int:
    for name in (STEPS_PART, STEPS):
        with contextlib.suppress(FileNotFoundError):
            return (folder / name).read_bytes().count(b"\n")
    return 0


def _require_alive(process: subprocess.Popen, folder: Path) -> None:
    if process.poll():
        log = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
        raise RuntimeError(f"{folder.name}: a process left with exit code {process.returncode}:\n{log}")


def _row(
    case: Case, engine: str, record: Record, spans: Sequence[tuple[float, int, int]], sent: float
) -> LinkRow:
    times = [step.step_time_ms for step in read_steps(record.folder / STEPS)]
    rates = []
    for gbit in sorted({gbit for gbit, _, _ in spans}, key=lambda gbit: -gbit or -1e9):
        own = [ms for cap, first, last in spans if cap == gbit for ms in times[first:last]]
        low, middle, high = statistics.quantiles(own, n=4)
        rates.append(AtRate(gbit=gbit, step_ms=middle, low_ms=low, high_ms=high, steps=len(own)))
    return LinkRow(
        case=case.name,
        engine=engine,
        devices=record.manifest.devices,
        crossing_bytes=sum(row.crossing_bytes for row in record.ledger.rows),
        sent_bytes=sent,
        rates=rates,
    )


def chosen(words: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """Cases by the beginning of their names, each with its engines; all without words."""
    for case in CASES:
        if not words or case.name.startswith(tuple(words)):
            yield from ((case, engine) for engine in case.engines if engine in ENGINES)


def main(words: list[str]) -> int:
    """Measure, and keep it; with --once only try. Returns the exit code."""
    once = "--once" in words
    names = [word for word in words if word != "--once"]
    rates = (0, 1) if once else (*RATES_GBIT, *RATES_GBIT[-2::-1])
    begun = here_and_now()
    with TwoHosts() as hosts, tempfile.TemporaryDirectory() as folder:
        links = []
        for gbit in RATES_GBIT:
            hosts.cap(gbit)
            bandwidth, latency_s = hosts.probe()
            links.append(Link(gbit=gbit, bytes_per_s=bandwidth, latency_s=latency_s))
            print(f"{links[-1]}", file=sys.stderr, flush=True)
        rows, missing = list[LinkRow](), dict[str, str]()
        for number, (case, engine) in enumerate(chosen(names)):
            started = time.monotonic()
            try:
                rows.append(measured(case, engine, hosts, Path(folder) / f"{number}-{engine}", rates))
            except (RuntimeError, RecordError, subprocess.TimeoutExpired) as error:
                missing[f"{case.name}, {engine}"] = str(error)
                print(f"{case.name}, {engine} is MISSING: {error}", file=sys.stderr, flush=True)
                continue
            figures = ", ".join(f"{one.gbit:g}: {one.step_ms:.1f}" for one in rows[-1].rates)
            took = time.monotonic() - started
            print(f"{case.name}, {engine}: ms by gbit/s {figures}; {took:.0f} s", file=sys.stderr, flush=True)
    found = Links(circumstances=begun, links=links, rows=rows, missing=missing)
    if once or names or not rows:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 1 if missing else 0
    write_atomically(DATA, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    from links_tables import draw

    draw(found)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
