"""`shardpair doctor`: what is installed, which devices there are, what each engine can run here."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading

import msgspec
from msgspec import Struct
from rich.table import Table

from compare.commands.arguments import SidePythons, pythons_of
from compare.contract.engines.registry import ENGINES, STUDIED
from compare.contract.experiment import MAX_CPU_DEVICES, Experiment
from compare.execute.safe_path import with_safe_path
from compare.terminal.console import coloured, print_json, results_console

TIMEOUT_S = 120
OUTPUT_BYTES = 1_000_000
LINE_LENGTH = 300


class SideReport(Struct, frozen=True, kw_only=True):
    """Output of `python -m SIDE --doctor`."""

    versions: dict[str, str]
    cpu_devices: str
    gpus: list[str]


class EngineReport(Struct, frozen=True, kw_only=True):
    """One engine, and what it can run here."""

    engine: str
    decides: str
    gradient_sync: tuple[str, ...]
    cpu_devices: str
    gpu_devices: str


class Doctor(SidePythons, frozen=True, kw_only=True):
    """Say what is installed, which devices there are, and what each engine can run here."""

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Examine both sides. Returns 0 if both work, 3 if one does not."""
        sides = {side: examine(side, python) for side, python in pythons_of(self).items()}
        code = 0 if all(isinstance(found, SideReport) for found in sides.values()) else 3
        if self.json:
            found_or_why = {
                side: found if isinstance(found, SideReport) else {"error": found}
                for side, found in sides.items()
            }
            print_json({"sides": found_or_why, "engines": engine_reports(sides)})
            return code
        console = results_console()
        for side, found in sides.items():
            console.print(
                _side_table(side, found) if isinstance(found, SideReport) else coloured(found, "red")
            )
        console.print(_engine_table(sides))
        return code


def examine(side: str, python: str) -> SideReport | str:
    """Ask one side about itself; one line of why not if it cannot answer."""
    if not shutil.which(python):
        return f"{side}: {python}: no such program"
    try:
        returncode, output = _ask([python, "-m", side, "--doctor"])
    except OSError as error:
        return f"{side}: {python}: {error.strerror}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if returncode:
        return f"{side}: {_shortened(lines[-1]) if lines else f'{python} ended with exit code {returncode}'}"
    for line in reversed(lines):  # a warning may come after it
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=SideReport)
    said = f"it says {_shortened(lines[-1])}" if lines else "it says nothing"
    return f"{side}: {python} is no Python that has {side}: {said}"


def _ask(command: list[str]) -> tuple[int, str]:
    """Exit code and output, errors among it, of a command that may be any program: its time and its words
    are limited."""
    process = subprocess.Popen(
        command,
        start_new_session=True,  # whatever it starts ends with it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=with_safe_path(os.environ),
    )
    assert process.stdout
    timer = threading.Timer(TIMEOUT_S, _kill, [process])
    timer.start()
    try:
        output = process.stdout.read(OUTPUT_BYTES)
        process.stdout.close()  # one that would say more ends here
        process.wait()
    finally:
        timed_out = not timer.is_alive()
        timer.cancel()
        _kill(process)
        process.wait()
    if timed_out:
        raise OSError(errno.ETIMEDOUT, f"no answer for {TIMEOUT_S} s")
    return process.returncode, output.decode(errors="replace")


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " ..."


def _side_table(side: str, found: SideReport) -> Table:
    table = Table(title=side, show_header=False)
    for package, version in found.versions.items():
        table.add_row(package, version)
    table.add_row("CPU", found.cpu_devices)
    table.add_row("GPUs", ", ".join(found.gpus) or "none")
    return table


def engine_reports(sides: dict[str, SideReport | str]) -> list[EngineReport]:
    """A report for each engine: what it can run here."""
    reports = []
    for engine in STUDIED.values():
        found = sides[engine.side]
        if isinstance(found, SideReport):
            cpu, gpu = (
                f"1 to {MAX_CPU_DEVICES} (virtual)",
                f"1 to {len(found.gpus)}" if found.gpus else "none",
            )
        else:
            cpu = gpu = "not installed"
        reports.append(
            EngineReport(
                engine=engine.name,
                decides=engine.decides,
                gradient_sync=engine.gradient_sync,
                cpu_devices=cpu,
                gpu_devices=gpu,
            )
        )
    return reports


def _engine_table(sides: dict[str, SideReport | str]) -> Table:
    table = Table(title="What each engine can run here")
    for column in ("engine", "who moves the data", "gradient synchronisation", "cpu devices", "gpu devices"):
        table.add_column(column)
    for report in engine_reports(sides):
        syncs = ", ".join(report.gradient_sync)
        works = isinstance(sides[ENGINES[report.engine].side], SideReport)
        cpu = report.cpu_devices if works else coloured(report.cpu_devices, "red")
        table.add_row(report.engine, report.decides, syncs, cpu, report.gpu_devices if works else "")
    return table
