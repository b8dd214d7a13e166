"""Engines x rows: the cases of a study whose tables have a column for each engine, and such a table."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from compare.contract.request import Request
from compare.judge.outcome import Case, Grid, Outcome
from compare.setup.fitting import as_preset
from compare.setup.presets import edits_of, spread
from compare.show.findings import NONE, Row, Table, Text
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate


def grid(
    engines: Iterable[str],
    rows: Mapping[str, Experiment],
    *,
    against: str = "",
    as_presets: bool = False,
    **asks: Any,
) -> Grid:
    """A case for each engine and row; what an engine refuses is left out, with its own words.

    `rows` has experiments by the name of their layout or setting, `against` is the case that all are held
    against, and `asks` are fields of every request. Rows that are presets, `as_presets`, are trained as each
    engine has them.
    """
    cases, left_out = {}, {}
    engines = list(engines)
    for row, experiment in rows.items():
        for engine in engines:
            name = f"{engine}.{row}" if row else engine
            try:
                spec = revalidate(experiment)
                spec = as_preset(engine, spec) if as_presets else spec
                ENGINES[engine].require_experiment(spec)
            except ExperimentError as error:
                left_out[name] = str(error)
                continue
            request = Request(engine=engine, experiment=spec, **asks)
            cases[name] = Case(request=request, layout=row, against="" if name == against else against)
    return cases, left_out


def varied(
    experiment: Experiment, presets: Mapping[str, int], variants: Iterable[str], *, skips: bool = False
) -> tuple[dict[str, Experiment], dict[str, str]]:
    """Rows for `grid`: each preset on its devices in each setting, `fsdp, precision.dtype=float32`; and why
    others cannot be. Raises ExperimentError for these, unless it `skips` them."""
    rows, refused = {}, {}
    for variant, (name, devices) in itertools.product(("", *variants), presets.items()):
        row = ", ".join(filter(None, (name, variant)))
        try:
            rows[row] = spread(edited(experiment, edits_of(variant)), name, devices)
        except ExperimentError as error:
            if not skips:
                raise
            refused[row] = str(error)
    return rows, refused


def beside_first(engines: Sequence[str], experiment: Experiment, **asks: Any) -> dict[str, Case]:
    """A case for each engine, held against the first. Whether it can run is asked before anything starts."""
    requests = {name: Request(engine=name, experiment=experiment, **asks) for name in engines}
    return {
        name: Case(request=request, against="" if name == engines[0] else engines[0])
        for name, request in requests.items()
    }


def against_one_device(
    engines: Iterable[str],
    rows: Mapping[str, Experiment],
    *,
    as_presets: bool = False,
    ladder: bool = True,
) -> Grid:
    """`grid`, each row held against one unsharded device of the same training, which comes before it.

    The reference is torchpar's plain module: PyTorch's autograd, no container around it, no collective.
    """
    found, left_out, names = {}, {}, {}
    engines = list(engines)
    for row, experiment in rows.items():
        single = spread(experiment, "single")
        if single not in names:
            names[single] = f"reference.{len(names) + 1}" if names else "reference"
            request = Request(engine=REFERENCE, experiment=single, ladder=ladder)
            found[names[single]] = Case(request=request, layout="one device")
        asked = {"against": names[single], "as_presets": as_presets, "ladder": ladder}
        more, out = grid(engines, {row: experiment}, **asked)
        found, left_out = found | more, left_out | out
    return found, left_out


def pivot(title: str, outcome: Outcome, cell: Callable[[str], Text]) -> Table:
    """A table with a row for each row of cases and a column for each engine; `cell` is of a case's name."""
    at = {(case.row, case.engine): name for name, case in outcome.cases.items() if case.row != "one device"}
    rows, engines = (list(dict.fromkeys(of)) for of in zip(*at, strict=True)) if at else ([], [])
    cells = {place: cell(name) for place, name in at.items()}
    return Table(
        name=title,
        corner="layout",
        columns=engines,
        rows=[
            Row(Text(row or "as it is"), [cells.get((row, engine), Text(NONE)) for engine in engines])
            for row in rows
        ],
    )
