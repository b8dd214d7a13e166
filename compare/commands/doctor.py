"""`shardpair doctor`: what is installed, which devices there are, what each engine can run here."""

from msgspec import Struct

from compare.execute.ask import ask
from compare.execute.launch import EnvironmentMissing
from compare.flags import SidePythons, pythons_of
from compare.show.findings import Row, Table, Text
from compare.show.terminal import terminal_table
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import MAX_CPU_DEVICES
from compare.terminal import print_json, results_console


class SideReport(Struct, frozen=True, kw_only=True):
    """Output of `python -m SIDE --doctor`."""

    versions: dict[str, str]
    cpu_devices: str
    gpus: list[str]


class Doctor(SidePythons, frozen=True, kw_only=True):
    """Say what is installed, which devices there are, and what each engine can run here."""

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Examine both sides. Returns 0 if both work, else 3."""
        sides = {side: examine(side, python) for side, python in pythons_of(self).items()}
        errors = {side: report for side, report in sides.items() if isinstance(report, str)}
        engines = engine_reports(sides)
        if self.json:
            said = {side: {"error": of} if side in errors else of for side, of in sides.items()}
            print_json({"sides": said, "engines": engines})
            return 3 if errors else 0
        console = results_console()
        for side, report in sides.items():
            if isinstance(report, str):
                console.print(report, style="red")
                continue
            devices = {"CPU": report.cpu_devices, "GPUs": ", ".join(report.gpus) or "none"}
            console.print(
                _table("", [{side: name, "": of} for name, of in (report.versions | devices).items()])
            )
        console.print(_table("What each engine can run here", engines))
        return 3 if errors else 0


def examine(side: str, python: str) -> SideReport | str:
    """Ask one side about itself; one line of why not if it cannot answer."""
    try:
        return ask(side, python, ["--doctor"], answer=SideReport, platform="")
    except EnvironmentMissing as missing:
        return str(missing)


def engine_reports(sides: dict[str, SideReport | str]) -> list[dict[str, str]]:
    """What each engine can run here, by column."""
    reports = []
    for engine in STUDIED.values():
        report, cpu, gpu = sides[engine.side], f"1 to {MAX_CPU_DEVICES} (virtual)", "none"
        if isinstance(report, str):
            cpu = gpu = "not installed"
        elif report.gpus:
            gpu = f"1 to {len(report.gpus)}"
        about = {"engine": engine.name, "who_moves_the_data": engine.decides}
        syncs = {"gradient_synchronisation": ", ".join(engine.gradient_sync)}
        reports.append({**about, **syncs, "cpu_devices": cpu, "gpu_devices": gpu})
    return reports


def _table(name: str, rows: list[dict[str, str]]) -> object:
    corner, *columns = rows[0]
    texts = [[*map(Text, row.values())] for row in rows]
    words = [column.replace("_", " ") for column in columns]
    table = Table(
        name=name, corner=corner, columns=words, rows=[Row(head, of) for head, *of in texts], look="words"
    )
    return terminal_table(table)
