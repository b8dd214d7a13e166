"""Fill the report's template from a comparison, whether all of it finished or not."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET

from compare.contract.communication import summed
from compare.contract.record import Record
from compare.host.disk import write_atomically
from compare.judge.outcome import Outcome, read_run
from compare.numerics.parameters import parameter_count
from compare.present.host_tables import host_table
from compare.present.memory_tables import at_peak
from compare.present.report import tables
from compare.present.report.beside import (
    MeasuredCeiling,
    ceilings_beside,
    files_of,
    links_beside,
    own_links,
)
from compare.present.report.memory import at_rest, device_table, memory_table, peak_table
from compare.present.report.template import render_page
from compare.present.report.traffic import ledger_notes, ledger_table
from compare.present.tables import REMOVED
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import to_toml
from compare.studies.ledgers import engine_ledger
from compare.terminal import layout_in_words

PAGE = "report.html"
EXPERIMENT = "experiment.toml"
"""The resolved experiment, saved beside the page."""


def write_report(folder: Path) -> Path:
    """Write `folder/report.html`: one file, nothing fetched, light and dark; and experiment.toml beside it.

    Args:
        folder: of a comparison of which a case has finished.

    Returns:
        The page's path.

    Raises:
        RecordError: it is none, or a file of it is garbled.
    """
    comparison, records = read_run(folder)
    spec = to_toml(comparison.experiment)
    write_atomically(folder / EXPERIMENT, spec.encode())
    page = render_page(
        "report.html",
        comparison=comparison,
        missing=comparison.failures | dict.fromkeys(comparison.not_run, "did not run"),
        continuation="" if comparison.is_complete else comparison.how_to_go_on(folder.absolute()),
        command=comparison.line,
        removed=REMOVED,
        parameters=parameter_count(comparison.experiment.model),
        spec=spec,
        own_links=own_links(folder),
        others=links_beside(folder, comparison),
        **_summary(comparison),
        **_findings(comparison, records, ceilings_beside(folder, comparison, records)),
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def _summary(comparison: Outcome) -> dict[str, object]:
    """The head of the page: what was compared, and under which layout."""
    experiments = [request.experiment for request in comparison.requests.values()]
    layouts = {experiment.layout for experiment in experiments}
    if len(layouts) > 1:
        sizes = sorted({layout.devices for layout in layouts})
        counts = " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1))
        layout = f"{len(layouts)} layouts on {counts} {comparison.platform.upper()} devices, named below"
    else:
        layout = layout_in_words(experiments[0], comparison.platform)
    number = len(experiments)
    what = "engine" if comparison.requests.keys() <= ENGINES.keys() else "case"
    return {
        "subject": f"{number} {what}{'s' if number != 1 else ''}",
        "layout": layout,
        "has_many_layouts": len(layouts) > 1,
        "state": "" if comparison.passed and not comparison.verdicts else _news(comparison.passed),
    }


def _findings(
    comparison: Outcome, records: list[Record], ceilings: Sequence[MeasuredCeiling | None]
) -> dict[str, object]:
    """Pictures and tables of what finished."""
    from compare.present.report.lanes import measured_steps
    from compare.present.report.pictures import memory_curves, peak_words, pictures, timelines

    names = comparison.finished
    held = [at_rest(record) for record in records]
    peaks = [at_peak(record) for record in records]
    sums = [summed(record.ledger.rows) for record in records]
    beside = [engine_ledger(name, record) for name, record in zip(names, records, strict=True)]
    return {
        "pictures": pictures(comparison, records, held),
        "timelines": [*measured_steps(names, records), *timelines(records)],
        "layouts": tables.layout_table(comparison, records),
        "hosts": [
            host_table(layout, list(hosts))
            for layout, hosts in dict.fromkeys(
                (record.manifest.experiment.layout, tuple(record.manifest.hosts))
                for record in records
                if len(set(record.manifest.hosts)) > 1
            )
        ],
        "costs": tables.cost_table(comparison, ceilings),
        "utilisation": _utilisation(comparison, ceilings),
        "ladder": tables.ladder_table(comparison.verdicts),
        "reasons": tables.tolerance_reasons(comparison.verdicts),
        "memory": memory_table(names, held),
        "peaks": peak_table(names, peaks) if any(peaks) else None,
        "moments": peak_words(names, peaks),
        "curves": memory_curves(names, records),
        "devices": [
            device_table(name, one, record.manifest.experiment.layout.axes)
            for name, one, record in zip(names, held, records, strict=True)
            if one
        ],
        "ledger": ledger_table(names, sums, comparison.costs, beside),
        "ledger_notes": ledger_notes(beside),
        "manifests": [
            (
                name,
                ENGINES[record.manifest.engine].decides,
                tables.manifest_table(name, record),
                files_of(name, record),
            )
            for name, record in zip(names, records, strict=True)
        ],
    }


def _utilisation(comparison: Outcome, ceilings: Sequence[MeasuredCeiling | None]) -> str:
    """What the model's operations are held against; where nothing is known, how to find it out."""
    counted = "GFLOP/s are the model's, forward and backward, without what is computed anew."
    if any(cost.mfu is not UNSET for cost in comparison.costs):
        return f"{counted} MFU is their share of what the vendor promises of the devices."
    if any(ceilings):
        return f"{counted} The ceiling is the fastest matrix product of the same framework on this machine."
    return (
        f"{counted} No vendor gives a peak of this device; a shardpair bench beside this run measures a "
        f"ceiling, and its share then stands here."
    )


def _news(good: bool) -> str:
    return "pass" if good else "fail"
