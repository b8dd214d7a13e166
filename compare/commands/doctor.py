"""`shardpair doctor`: what is installed, which devices there are, what each engine can run here."""

import tempfile
import time
from pathlib import Path

from msgspec import Struct
from rich.table import Table

from compare.execute.host_report import HostReport, SideReport, examine, objections, reports
from compare.execute.hosts import Hosts, Launcher, find_hosts
from compare.execute.paths import RUNS
from compare.flags.pythons import SidePythons, pythons_of
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment, ExperimentError
from compare.terminal import coloured, print_json, results_console


class EngineReport(Struct, frozen=True, kw_only=True):
    """One engine, and what it can run here."""

    engine: str
    decides: str
    gradient_sync: tuple[str, ...]
    cpu_devices: str
    gpu_devices: str


class Doctor(SidePythons, frozen=True, kw_only=True):
    """Say what is installed, which devices there are, and what each engine can run here; or, inside an
    allocation, on every host of it, and whether they fit each other."""

    json: bool = False
    """Print one JSON object on stdout instead of tables."""
    launcher: Launcher = "local"
    """slurm: ask every host of this allocation (`salloc`, `sbatch`): versions, devices, interface, clock, and
    whether it sees the folder of the results."""
    hosts: int = 0
    """With --launcher slurm: so many hosts of the allocation; all by default."""
    folder: Path = RUNS
    """With --launcher slurm: the folder of the results, which all hosts should see."""

    def __call__(self, default: Experiment) -> int:
        """Examine both sides. Returns 0 if both work, and the hosts fit each other, else 3.

        Raises:
            ExperimentError: --hosts without SLURM, no allocation, or no such folder.
            EnvironmentMissing: a host did not answer.
        """
        if self.launcher == "slurm":
            return self._of_hosts(find_hosts(self.launcher, self.hosts))
        if self.launcher != "local" or self.hosts:
            raise ExperimentError("shardpair doctor asks other hosts through SLURM: give --launcher slurm")
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

    def _of_hosts(self, hosts: Hosts) -> int:
        if not self.folder.is_dir():
            raise ExperimentError(f"--folder {self.folder}: there is no such folder; give the results'")
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="probe.") as probe:
            began = time.time()
            found = reports(hosts, Path(probe.name), pythons_of(self))
            wrong = objections(found, began_s=began, ended_s=time.time())
        if self.json:
            print_json({"hosts": found, "objections": wrong})
            return 3 if wrong else 0
        console = results_console()
        console.print(_host_table(found))
        for line in wrong:
            console.print(coloured(line, "red"))
        if not wrong:
            console.print(f"{len(found)} hosts fit each other, and share {self.folder}")
        return 3 if wrong else 0


def _host_table(found: list[HostReport]) -> Table:
    table = Table(title="Hosts")
    for column in ("host", "cores", "GPUs", "interface", "address", "folder", "versions"):
        table.add_column(column)
    for one in found:
        sides = (side for side in one.sides.values() if isinstance(side, SideReport))
        versions = {package: version for side in sides for package, version in side.versions.items()}
        table.add_row(
            one.host,
            str(one.cores),
            str(one.gpus),
            one.interface or "none",
            one.address,
            "seen" if one.sees_folder else "not seen",
            ", ".join(f"{package} {version}" for package, version in versions.items()),
        )
    return table


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
