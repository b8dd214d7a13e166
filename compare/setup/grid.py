"""Engines x rows: the cases of a study whose tables have a column for each engine, and such a table."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from compare.contract.request import Request
from compare.judge.outcome import Case, Grid, Outcome
from compare.setup.fitting import as_preset
from compare.setup.presets import check_settings, edits_of, setting_without, spread
from compare.show.findings import NONE, Row, Table, Text
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import (
    SAME_NUMBERS,
    Experiment,
    ExperimentError,
    Layout,
    Model,
    edited,
    revalidate,
)

ONE_DEVICE = "one device"
"""The layout of a reference."""
Rows = list[tuple[dict[str, str], Experiment]]
"""Experiments with their coordinates (`Case.coordinates`)."""


def grid(
    engines: Iterable[str], rows: Rows, *, against: str = "", as_presets: bool = False, **request: Any
) -> Grid:
    """A case for each engine and row, compared with the case `against`; engines that reject a row, and why.

    With `as_presets` an engine may change a row's schedule: see `as_preset`. `request` are fields of every
    request.
    """
    cases, left_out = {}, {}
    for (coordinates, experiment), engine in itertools.product(rows, list(engines)):
        case = Case(
            request=Request(engine=engine, experiment=experiment, **request),
            coordinates=coordinates,
            against=against,
        )
        name = f"{engine}.{case.row}" if case.row else engine
        try:
            spec = revalidate(experiment)
            spec = as_preset(engine, spec) if as_presets else spec
            why = ENGINES[engine].why_not_train(spec)
        except ExperimentError as error:
            why = str(error)
        if why:
            left_out[name] = why
        else:
            cases[name] = replace(case, request=replace(case.request, experiment=spec))
    return cases, left_out


def vary(
    experiment: Experiment,
    layouts: Mapping[str, tuple[str, int | None]],
    variants: Sequence[str],
    *,
    flags: Collection[str] = (),
    skips: bool = False,
) -> tuple[Rows, dict[str, str]]:
    """Rows for `grid`: each layout as it is, and in each variant; and rejected rows, with why.

    A layout has a name, a preset and a number of devices. A variant without effect under a layout is rejected
    there. Raises ExperimentError: two variants are the same training, or a row cannot run, unless it `skips`
    such rows.
    """
    check_settings("--variants", variants, experiment, [preset for preset, _ in layouts.values()])
    rows, refused, idle = [], {}, Counter[str]()
    for variant, (name, (preset, devices)) in itertools.product(("", *variants), layouts.items()):
        edits = edits_of(variant)
        fields = {*flags, *edits.get("layout", {})}
        place = {"layout": name} | ({"variant": variant} if variant else {})
        row = ", ".join(place.values())
        try:
            spec = spread(edited(experiment, edits), preset, devices, fields)
        except ExperimentError as error:
            if not skips:
                raise
            refused[row] = str(error)
            continue
        if any(spec == other and name == at["layout"] for at, other in rows):
            refused[row] = f"{variant} has no effect under {name}"
            idle[variant] += 1
            if idle[variant] == len(layouts):
                raise ExperimentError(f"--variants {variant} has no effect under {', '.join(layouts)}")
        else:
            rows.append((place, spec))
    return rows, refused


def against_one_device(
    engines: Iterable[str], rows: Rows, *, as_presets: bool = False, ladder: bool = True
) -> Grid:
    """`grid`, each row compared with one unsharded device of the same training, which comes first.

    The reference is torchpar's plain module: PyTorch's autograd, without wrapper and without collective. Rows
    that differ only in their layout, which changes no numbers, share the reference of the first.
    """
    found: dict[str, Case] = {}
    left_out: dict[str, str] = {}
    names: dict[Experiment, str] = {}
    engines = list(engines)
    for coordinates, experiment in rows:
        single = spread(experiment, "single")
        # Layouts and attention cores change no numbers, and the reference runs operator by operator.
        layout = replace(next(iter(names), single).layout, compile=Layout().compile)
        plain = replace(single, layout=layout, model=replace(single.model, attention=Model().attention))
        if plain not in names:
            variant = setting_without(coordinates.get("variant", ""), "layout.", SAME_NUMBERS)
            place = {"layout": ONE_DEVICE} | ({"variant": variant} if variant else {})
            names[plain] = f"reference, {variant}" if variant else "reference"
            request = Request(engine=REFERENCE, experiment=plain, ladder=ladder)
            found[names[plain]] = Case(request=request, coordinates=place)
        how = {"against": names[plain], "as_presets": as_presets, "ladder": ladder}
        more, out = grid(engines, [(coordinates, experiment)], **how)
        found, left_out = found | more, left_out | out
    return found, left_out


def pivot(title: str, outcome: Outcome, cell: Callable[[str], Text]) -> Table:
    """A table with a row for each row of cases and a column for each engine; `cell` is of a case's name."""
    at = {
        (case.row, case.engine): name
        for name, case in outcome.cases.items()
        if case.coordinates.get("layout") != ONE_DEVICE
    }
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
