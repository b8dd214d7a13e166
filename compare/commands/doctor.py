"""`shardpair doctor`: what is installed, which devices there are, what each engine can run here."""

import subprocess
import sys

import msgspec
from msgspec import Struct
from rich.table import Table

from compare.console import results_console
from compare.contract.engines import ENGINES
from compare.contract.experiment import MAX_CPU_DEVICES, Experiment

TIMEOUT_S = 120


class SideReport(Struct, frozen=True, kw_only=True):
    """What `python -m SIDE --doctor` prints."""

    versions: dict[str, str]
    cpu_devices: str
    gpus: list[str]


class Doctor(Struct, frozen=True, kw_only=True):
    """Say what is installed, which devices there are, and what each engine can run here."""

    jax_python: str = sys.executable
    """Python that runs jaxpar."""
    torch_python: str = sys.executable
    """Python that runs torchpar."""

    def __call__(self, default: Experiment) -> int:
        """Examine both sides. Returns 0 if both work, 3 if one does not."""
        pythons = {"jaxpar": self.jax_python, "torchpar": self.torch_python}
        sides = {side: examine(side, python) for side, python in pythons.items()}
        console = results_console()
        for side, found in sides.items():
            console.print(_side_table(side, found) if isinstance(found, SideReport) else f"[red]{found}")
        console.print(_engine_table(sides))
        return 0 if all(isinstance(found, SideReport) for found in sides.values()) else 3


def examine(side: str, python: str) -> SideReport | str:
    """Ask one side about itself; one line of why not if it cannot answer."""
    try:
        done = subprocess.run(
            [python, "-m", side, "--doctor"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{side}: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"{side}: {lines[-1]}"
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=SideReport)


def _side_table(side: str, found: SideReport) -> Table:
    table = Table(title=side, show_header=False)
    for package, version in found.versions.items():
        table.add_row(package, version)
    table.add_row("CPU", found.cpu_devices)
    table.add_row("GPUs", ", ".join(found.gpus) or "none")
    return table


def _engine_table(sides: dict[str, SideReport | str]) -> Table:
    table = Table(title="What each engine can run here")
    for column in ("engine", "who moves the data", "gradient synchronisation", "cpu devices", "gpu devices"):
        table.add_column(column)
    for engine in ENGINES.values():
        found = sides[engine.side]
        works = isinstance(found, SideReport)
        table.add_row(
            engine.name,
            engine.decides,
            ", ".join(engine.gradient_sync),
            f"1 to {MAX_CPU_DEVICES} (virtual)" if works else "[red]not installed",
            (f"1 to {len(found.gpus)}" if found.gpus else "none") if works else "",
        )
    return table
