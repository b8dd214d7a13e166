"""`shardpair doctor`: what is installed, which devices there are, what each engine can run here."""

import os

from msgspec import Struct
from rich.table import Table

from compare.execute.ask import ask
from compare.execute.safe_path import with_safe_path
from compare.flags.pythons import SidePythons, pythons_of
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment
from compare.terminal.console import coloured, print_json, results_console


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
    return ask(side, python, ["--doctor"], answer=SideReport, environment=with_safe_path(os.environ))


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
