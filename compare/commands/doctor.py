"""`shardpair doctor`: what is installed, which devices there are, what each engine can run here."""

from msgspec import Struct
from rich.table import Table

from compare.execute.ask import ask
from compare.execute.launch import EnvironmentMissing
from compare.flags import SidePythons, pythons_of
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import MAX_CPU_DEVICES, Experiment
from compare.terminal import coloured, print_json, results_console


class SideReport(Struct, frozen=True, kw_only=True):
    """Output of `python -m SIDE --doctor`."""

    versions: dict[str, str]
    cpu_devices: str
    gpus: list[str]


class Doctor(SidePythons, frozen=True, kw_only=True):
    """Say what is installed, which devices there are, and what each engine can run here."""

    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Examine both sides. Returns 0 if both work, else 3."""
        sides = {side: examine(side, python) for side, python in pythons_of(self).items()}
        engines = engine_reports(sides)
        console = results_console()
        if self.json:
            print_json(
                {
                    "sides": {
                        side: {"error": found} if isinstance(found, str) else found
                        for side, found in sides.items()
                    },
                    "engines": engines,
                }
            )
        else:
            for side, found in sides.items():
                console.print(coloured(found, "red") if isinstance(found, str) else _side_table(side, found))
            table = Table(title="What each engine can run here")
            for column in engines[0]:
                table.add_column(column.replace("_", " "))
            for row in engines:
                table.add_row(*row.values())
            console.print(table)
        return 3 if any(isinstance(found, str) for found in sides.values()) else 0


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
        found, cpu, gpu = sides[engine.side], f"1 to {MAX_CPU_DEVICES} (virtual)", "none"
        if isinstance(found, str):
            cpu = gpu = "not installed"
        elif found.gpus:
            gpu = f"1 to {len(found.gpus)}"
        reports.append(
            {
                "engine": engine.name,
                "who_moves_the_data": engine.decides,
                "gradient_synchronisation": ", ".join(engine.gradient_sync),
                "cpu_devices": cpu,
                "gpu_devices": gpu,
            }
        )
    return reports


def _side_table(side: str, found: SideReport) -> Table:
    table = Table(title=side, show_header=False)
    for package, version in found.versions.items():
        table.add_row(package, version)
    table.add_row("CPU", found.cpu_devices)
    table.add_row("GPUs", ", ".join(found.gpus) or "none")
    return table
