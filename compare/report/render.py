"""Fill the report's template from a finished comparison."""

from pathlib import Path

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compare.comparison import read_comparison
from compare.contract.engines import ENGINES
from compare.contract.experiment import to_toml
from compare.contract.parameters import parameter_count
from compare.contract.record import write_atomically
from compare.numerics import RUNGS
from compare.outcome import cost_rows
from compare.units import human_bytes

PAGE = "report.html"


def write_report(folder: Path) -> Path:
    """Write `folder/report.html`: one file, nothing fetched, light and dark.

    Args:
        folder: of a finished comparison.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: the comparison is not complete.
    """
    from compare.report import figures  # matplotlib takes seconds to import, and only a report needs it

    comparison, records = read_comparison(folder)
    names, costs = comparison.cases, comparison.costs
    pictures = [
        ("Loss", figures.loss_curves(names, records), "All curves, laid over each other."),
        ("Step time", figures.step_times(names, costs), _timing_caption(comparison.platform)),
        ("Peak memory", figures.peak_memory(names, costs), _memory_caption(names, records)),
        (
            "Communication",
            figures.communication(names, costs),
            "What one device sends and receives in a step.",
        ),
    ]
    if len(names) > 1:
        difference = (
            "Loss difference",
            figures.loss_differences(names, records),
            "Rounding grows as training goes on: the same sums in another order, fed back at every step.",
        )
        pictures.insert(1, difference)
    environment = Environment(
        loader=PackageLoader("compare.report", package_path=""), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html").render(
        comparison=comparison,
        rungs=RUNGS,
        results={
            verdict.candidate: {result.rung: result for result in verdict.rungs}
            for verdict in comparison.verdicts
        },
        tolerances=comparison.verdicts[0].rungs if comparison.verdicts else [],
        pictures=[(title, Markup(svg), caption) for title, svg, caption in pictures],
        cost_rows=cost_rows(comparison),
        ledgers=[(name, record.ledger) for name, record in zip(names, records, strict=True)],
        manifests=[
            (name, ENGINES[record.manifest.engine].decides, record.manifest)
            for name, record in zip(names, records, strict=True)
        ],
        parameters=parameter_count(comparison.experiment.model),
        spec=to_toml(comparison.experiment),
        human_bytes=human_bytes,
        builtins=msgspec.to_builtins,
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def _timing_caption(platform: str) -> str:
    timings = "CPU timings: " if platform == "cpu" else ""
    return (
        f"{timings}one process for each engine, one after another, not interleaved; compilation and the "
        f"first step are apart. Good enough to see an order of magnitude, not to rank engines."
    )


def _memory_caption(names: list[str], records: list) -> str:
    return "; ".join(
        f"{name}: {record.manifest.peak_memory_method}" for name, record in zip(names, records, strict=True)
    )
