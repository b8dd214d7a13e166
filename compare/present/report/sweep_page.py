"""Fill the page of a sweep."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from compare.contract.record import Record
from compare.host.disk import write_atomically
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.comparison import Comparison, how_to_go_on
from compare.numerics.parameters import parameter_count
from compare.present.report.repeat import EXPERIMENT
from compare.present.report.sweep_figures import pictures
from compare.present.report.tables import Row, Table, Text, manifest_table
from compare.present.report.template import render_page
from compare.present.sweep_tables import PAGE, headline, page_table, worth
from compare.present.tables import by_reason
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate, to_toml
from compare.studies.presets import SETTINGS, Said, layout_flag, settings_in, spread
from compare.studies.sweep import FIRST, SINGLE, SweepPlan, sweep_batches
from compare.studies.sweep_outcome import SweepOutcome
from compare.terminal.layout_words import layout_in_words


def write_page(
    outcome: SweepOutcome,
    comparisons: Mapping[str, Comparison],
    records: Mapping[str, Sequence[Record]],
    folder: Path,
) -> Path:
    """Write `folder/sweep.html`: one file, nothing fetched; and experiment.toml beside it.

    Args:
        outcome: what came of the sweep.
        comparisons: by batch.
        records: by batch, of each finished case.
        folder: of the sweep.
    """
    plan = outcome.plan
    spec = to_toml(own_experiment(plan))
    found = [record for of_batch in records.values() for record in of_batch]
    undone = [name for one in comparisons.values() for name in one.not_run]
    first = next(iter(comparisons.values()))
    by_engine = {record.manifest.engine: record for record in reversed(found)}
    page = render_page(
        "sweep.html",
        outcome=outcome,
        headline=headline(plan),
        worth=worth(outcome),
        parameters=parameter_count(plan.experiment.model),
        flops_per_token=model_flops_per_token(plan.experiment),
        steps=plan.experiment.train.max_iters,
        dtype=plan.experiment.precision.dtype,
        left_out=by_reason(outcome.left_out),
        missing=outcome.failures | dict.fromkeys(undone, "did not run"),
        continuation=how_to_go_on(first, folder.absolute() / next(iter(comparisons))),
        pictures=pictures(outcome, comparisons, records),
        table=page_table(outcome),
        layouts=_layout_table(comparisons, records, plan),
        manifests=[
            (name, ENGINES[name].decides, manifest_table(name, record)) for name, record in by_engine.items()
        ],
        command=repeat_command(plan),
        spec=spec,
    )
    write_atomically(folder / EXPERIMENT, spec.encode())
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def own_experiment(plan: SweepPlan) -> Experiment:
    """The experiment as a file: on one device if its own layout, which the strategies replace, cannot be."""
    try:
        return revalidate(plan.experiment)
    except ExperimentError:
        return spread(plan.experiment, SINGLE)


def repeat_command(plan: SweepPlan) -> str:
    """The command that makes this sweep again, in the folder of its page; '' if none does, which is tried."""
    base = own_experiment(plan)
    flags = {key: getattr(plan.experiment.layout, key) for key in sorted(plan.said.flags & set(SETTINGS))}
    again = msgspec.structs.replace(
        plan,
        experiment=edited(base, {"layout": flags}),
        said=Said(flags=frozenset(flags), file=settings_in(base.layout)),
    )
    if [batch.cases for batch in sweep_batches(again)] != [batch.cases for batch in sweep_batches(plan)]:
        return ""
    options = ["--presets", *plan.strategies, "--engines", *plan.engines]
    options += [word for key, value in flags.items() for word in layout_flag(key, value).split()]
    options += ["--devices", *map(str, plan.devices)]
    if plan.scaling != "none":
        options += ["--scaling", plan.scaling]
    if plan.platform != "cpu":
        options += ["--platform", plan.platform]
    if not plan.ladder:
        options.append("--no_ladder")
    if plan.init_from:
        options += ["--init_from", plan.init_from]
    return shlex.join(["shardpair", "sweep", EXPERIMENT, *options])


def _layout_table(
    comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]], plan: SweepPlan
) -> Table:
    """Every strategy in words, once."""
    words: dict[str, str] = {}
    for batch, comparison in comparisons.items():
        for name, record in zip(comparison.cases, records[batch], strict=True):
            label = FIRST if name == FIRST else " on ".join(name.split(".")[1:])
            words.setdefault(label, layout_in_words(record.manifest.experiment, plan.platform))
    rows = [Row(Text(label), [Text(layout)]) for label, layout in words.items()]
    return Table(name="Layouts", corner="strategy", columns=["layout"], rows=rows, look="words")
