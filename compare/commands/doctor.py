"""`shardpair doctor`: installed packages, and devices."""

from collections import Counter

from msgspec import Struct

from compare.execute.launch import EnvironmentMissing
from compare.execute.query import query
from compare.flags import AsJson, SidePythons, pythons_of
from compare.show.findings import Findings, Row, Table, Text
from compare.show.terminal import print_findings
from compare.spec.engines.registry import STUDIED


class SideReport(Struct, frozen=True, kw_only=True):
    """Output of `python -m SIDE --doctor`."""

    versions: dict[str, str]
    cpu_devices: str
    gpus: list[str]


class Doctor(SidePythons, frozen=True, kw_only=True):
    """Print the installed packages and the devices of each side."""

    json: AsJson = False

    def __call__(self) -> int:
        """Examine both sides. Returns 0 if both work, else 3."""
        sides = {side: examine(side, python) for side, python in pythons_of(self).items()}
        errors = {side: report for side, report in sides.items() if isinstance(report, str)}
        tables = []
        for side, report in sides.items():
            if isinstance(report, SideReport):
                devices = {"CPU": report.cpu_devices, "GPUs": ", ".join(report.gpus) or "none"}
                rows = [Row(Text(name), [Text(of)]) for name, of in (report.versions | devices).items()]
                tables.append(Table(name="", corner=side, columns=[""], rows=rows, words=1))
        able = [name for name, engine in STUDIED.items() if engine.side not in errors]
        gpus = Counter(
            max((of.gpus for of in sides.values() if isinstance(of, SideReport)), key=len, default=[])
        )
        names = ", ".join(f"{number} x {name}" for name, number in gpus.items()) or "none"
        count = f"all {len(able)}" if len(able) == len(STUDIED) else f"{len(able)} of {len(STUDIED)}"
        found = Findings(
            study="doctor",
            title="Packages and devices",
            sentence=f"{count} engines can run here; GPUs: {names}",
            passed=not errors,
            tables=tables,
            warnings=list(errors.values()),
            values={"sides": {side: {"error": of} if side in errors else of for side, of in sides.items()}},
        )
        print_findings(found, as_json=self.json)
        return 0 if found.passed else 3


def examine(side: str, python: str) -> SideReport | str:
    """The report of one side, or one line with the reason why it has none."""
    try:
        return query(side, python, ["--doctor"], answer=SideReport, platform="")
    except EnvironmentMissing as missing:
        return str(missing)
