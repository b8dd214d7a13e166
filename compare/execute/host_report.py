"""What a host has, as it says itself: `python -m compare.execute.host_report PROBE SIDE=PYTHON...`.

The doctor starts it on every host of an allocation, in one step of `srun`, and compares the answers.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from compare.contract.processes import first_host
from compare.execute.ask import ask
from compare.execute.hosts import Hosts, srun
from compare.execute.launch import EnvironmentMissing, visible_gpus, with_safe_path
from compare.host.facts import cores

PATIENCE_S = 300.0
CLOCK_S = 2.0
"""Further apart than this, clocks are worth a word: files' times, and the order of logs."""


class SideReport(Struct, frozen=True, kw_only=True):
    """Output of `python -m SIDE --doctor`."""

    versions: dict[str, str]
    cpu_devices: str
    gpus: list[str]


class HostReport(Struct, frozen=True, kw_only=True):
    """One host."""

    host: str
    cores: int
    gpus: int
    interface: str
    """By which it reaches the first host; '' if the system does not tell."""
    address: str
    """Of that interface."""
    sees_folder: bool
    clock_s: float
    """Its time of day, in seconds since 1970."""
    sides: dict[str, SideReport | str]
    """What each side says of itself, or one line of why it cannot."""


def examine(side: str, python: str) -> SideReport | str:
    """Ask one side about itself; one line of why not if it cannot answer."""
    return ask(side, python, ["--doctor"], answer=SideReport, environment=with_safe_path(os.environ))


def report(probe: Path, first: str, pythons: Mapping[str, str]) -> HostReport:
    """This host.

    Args:
        probe: a file that all hosts should see.
        first: the first host.
        pythons: the interpreter of each side.
    """
    interface, address = _way_to(first)
    clock = time.time()  # before anything slow
    return HostReport(
        host=socket.gethostname(),
        cores=cores(),
        gpus=visible_gpus(),
        interface=interface,
        address=address,
        sees_folder=probe.exists(),
        clock_s=clock,
        sides={side: examine(side, python) for side, python in pythons.items()},
    )


def _way_to(host: str) -> tuple[str, str]:
    """The interface by which a host is reached, and its address; or '' and why there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, 1))
        except OSError as error:
            return "", error.strerror or str(error)
        own = probe.getsockname()[0]
    found = (name for name, ways in psutil.net_if_addrs().items() if any(way.address == own for way in ways))
    return next(found, ""), own


def reports(hosts: Hosts, probe: Path, pythons: Mapping[str, str]) -> list[HostReport]:
    """All hosts of an allocation, in the order of their names.

    Args:
        hosts: started by SLURM.
        probe: a file in the folder of the results.
        pythons: the interpreter of each side.

    Raises:
        EnvironmentMissing: srun failed, or a host did not answer: one line.
    """
    asked = [str(probe.absolute()), *(f"{side}={python}" for side, python in pythons.items())]
    command = [*srun(hosts.count, 1), sys.executable, "-m", "compare.execute.host_report", *asked]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentMissing(f"srun: no answer of {hosts.count} hosts in {PATIENCE_S:g} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != hosts.count:
        said = " ".join(done.stderr.split()[-40:])
        raise EnvironmentMissing(f"srun: {len(lines)} of {hosts.count} hosts answered: {said}")
    found = [msgspec.json.decode(line, type=HostReport) for line in lines]
    return sorted(found, key=lambda one: one.host)


def objections(found: Sequence[HostReport], *, began_s: float, ended_s: float) -> list[str]:
    """What does not fit among hosts, a line each; the first is the one that the others are held against.

    Args:
        found: of all hosts.
        began_s, ended_s: of asking, by the clock of this one: each host's lies between them.
    """
    first, lines = found[0], list[str]()
    for one in found:
        off = max(began_s - one.clock_s, one.clock_s - ended_s)
        if off > CLOCK_S:
            lines.append(f"{one.host}: its clock is off by {off:,.0f} s or more")
        if not one.sees_folder:
            lines.append(f"{one.host}: it does not see the folder of the results")
        if one is not first and (not one.interface or one.interface.startswith("lo")):
            lines.append(f"{one.host}: no interface reaches {first.host}: {one.address}")
        for what in ("cores", "gpus"):
            own, usual = getattr(one, what), getattr(first, what)
            if own != usual:
                lines.append(f"{one.host}: {own} {what}, {first.host} has {usual}")
        for side, said in one.sides.items():
            lines += _of_side(one.host, side, said, first)
    return lines


def _of_side(host: str, side: str, own: SideReport | str, first: HostReport) -> list[str]:
    usual = first.sides.get(side)
    if isinstance(own, str):
        return [f"{host}: {own}"]
    if not isinstance(usual, SideReport):
        return []
    return [
        f"{host}: {package} {own.versions.get(package, 'is not installed')}, {first.host} has "
        f"{usual.versions.get(package, 'none')}"
        for package in sorted({*own.versions, *usual.versions})
        if own.versions.get(package) != usual.versions.get(package)
    ]


def main() -> int:
    """Print this host's report, a line of JSON. Returns 0."""
    probe, *pythons = sys.argv[1:]
    first = first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))
    found = report(Path(probe), first, dict(one.split("=", 1) for one in pythons))
    print(msgspec.json.encode(found).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
