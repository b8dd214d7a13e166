"""Who holds what: each device's part of every tensor and of the batch, and a picture of it.

The parts follow from the declarations that everything else reads: the mesh axes with what each splits
(`compare.spec.axes`), the table of parameters with the meaning of each dim, and the stages of a pipeline.
`tests/compare/test_lesson_figures.py` holds them to the closed forms of memory.
"""

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup
from msgspec import Struct

from compare.judge.closed_forms.memory import KINDS, parameters_of_stage
from compare.numerics.parameters import Parameter, block_parameters, end_parameters, parameter_count
from compare.present.lesson.drawing import Drawing
from compare.present.report.bars import KIND_COLOURS
from compare.spec.axes import BATCH, DP_SHARD, PP, SPLIT, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

Range = tuple[float, float]
"""Begin and end along one side, as fractions of it."""
WHOLE: Range = (0.0, 1.0)
ROWS = "#CC79A7"  # of a batch
MOST_DEVICES, MOST_LAYERS = 8, 8
TILE, LAYER, GAP, LEFT, TOP = 30, 15, 22, 78, 34  # pixels


class HeldPart(Struct, frozen=True):
    """What a device holds of a matrix: a range of its rows and one of its columns."""

    rows: Range
    columns: Range

    @property
    def share(self) -> float:
        """Of the matrix's elements."""
        return math.prod(end - begin for begin, end in (self.rows, self.columns))


def coordinates(device: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Position of a device in the mesh, by axis; the last axis counts fastest."""
    found = {}
    for axis, degree in reversed(list(axes.items())):
        device, found[axis] = divmod(device, degree)
    return found


def part_of(parameter: Parameter, kind: str, engine: str, experiment: Experiment, device: int) -> HeldPart:
    """A device's part of a parameter that its stage has, of the gradient of it, or of its moments.

    tp takes the side whose dims it splits. dp_shard takes the other one, from the ZeRO stage on that splits
    this kind.

    Args:
        parameter: one in the table.
        kind: of `KINDS`.
        engine: a name in ENGINES, which may split parameters earlier.
        experiment: its layout.
        device: its number in the mesh.
    """
    layout, at = experiment.layout, coordinates(device, experiment.layout.axes)
    sides = sides_of(parameter)
    split = [side for side, axes in enumerate(sides) if layout.tp > 1 and TP in map(SPLIT.get, axes)]
    ranges = [WHOLE, WHOLE]
    for side in split:
        ranges[side] = _slice(WHOLE, at[TP], layout.tp)
    if layout.zero >= ENGINES[engine].holds.sharded_from[kind]:
        side = next((side for side in (0, 1) if side not in split and sides[side]), 1)
        ranges[side] = _slice(ranges[side], at[DP_SHARD], layout.dp_shard)
    return HeldPart(*ranges)


def sides_of(parameter: Parameter) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The logical axes of a parameter as a matrix (rows, columns): the width is a side; a vector is a row."""
    axes = parameter.axes
    if not parameter.is_matrix:
        return (), axes
    return (axes[:1], axes[1:]) if axes[0] == "embed" else (axes[:-1], axes[-1:])


def layers_of(rank: int, experiment: Experiment) -> set[int]:
    """The layers of a rank of the pipeline: those of its stages, rank, rank + pp and so on."""
    layout, layers = experiment.layout, experiment.model.n_layer
    of_stage = layers // (layout.pp * layout.chunks)
    return {layer for layer in range(layers) if layer // of_stage % layout.pp == rank}


def share_of(kind: str, engine: str, experiment: Experiment, device: int) -> float:
    """What a device holds of a kind, in models: 0.25 of 1, or more than 1 / pp where stages share an end."""
    rank = coordinates(device, experiment.layout.axes)[PP]
    own = parameters_of_stage(engine, experiment, stage=rank)
    held = sum(p.size * part_of(p, kind, engine, experiment, device).share for p in own)
    return held / parameter_count(experiment.model)


def rows_of(device: int, experiment: Experiment) -> Range:
    """The rows of each batch that a device works on."""
    at, found = coordinates(device, experiment.layout.axes), WHOLE
    for axis in BATCH:
        found = _slice(found, at[axis], experiment.layout.axes[axis])
    return found


def alike(engines: Sequence[str], experiment: Experiment) -> list[list[str]]:
    """The engines in groups that hold the same, in the order in which they are given."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for engine in engines:
        own = ENGINES[engine].holds
        at_ends = own.ends_on_every_stage and experiment.layout.pp > 1
        parameters_split = experiment.layout.zero >= own.sharded_from["parameters"]
        groups.setdefault((at_ends, parameters_split), []).append(engine)
    return list(groups.values())


def picture(engine: str, experiment: Experiment) -> Markup:
    """A column for each device: its rows of the batch, and its part of each matrix of each layer, by kind."""
    devices = min(experiment.layout.devices, MOST_DEVICES)
    drawing = Drawing(f"Who holds what: {devices} devices of {engine}")
    bottom = 0.0
    for device in range(devices):
        x = LEFT + device * (4 * (TILE + 3) + GAP)
        bottom = _draw_device(drawing, x, device, engine, experiment)
    if experiment.layout.devices > devices:
        more = experiment.layout.devices - devices
        drawing.text(LEFT, bottom + 14, f"and {more} devices more", faint=True)
    return drawing.svg()


def _draw_device(drawing: Drawing, x: float, device: int, engine: str, experiment: Experiment) -> float:
    """One device's column. Returns where it ends."""
    axes = experiment.layout.axes
    where = ", ".join(
        f"{axis} {at}" for axis, at in reversed(coordinates(device, axes).items()) if axes[axis] > 1
    )
    drawing.text(x, 11, f"device {device}")
    drawing.text(x, 25, where, faint=True)
    y = _draw_rows(drawing, x, device, experiment)
    for kind in KINDS:
        share = share_of(kind, engine, experiment, device)
        drawing.text(x, y + 12, f"{kind}: {share:.0%}")
        y = _draw_kind(drawing, x, y + 17, device, kind, engine, experiment)
    return y


def _draw_rows(drawing: Drawing, x: float, device: int, experiment: Experiment) -> float:
    begin, end = rows_of(device, experiment)
    width = 4 * (TILE + 3) - 3
    if x == LEFT:
        drawing.text(0, TOP + 10, "batch rows", faint=True)
    drawing.box(x, TOP, width, LAYER - 3)
    drawing.box(x + begin * width, TOP, (end - begin) * width, LAYER - 3, colour=ROWS)
    return TOP + LAYER + 4


def _draw_kind(
    drawing: Drawing, x: float, y: float, device: int, kind: str, engine: str, experiment: Experiment
) -> float:
    """The matrices of the ends and of each layer, what the device has of each filled. Returns the end."""
    rank = coordinates(device, experiment.layout.axes)[PP]
    own = parameters_of_stage(engine, experiment, stage=rank)
    embeddings, _ = end_parameters(experiment.model)
    rows = [("embeddings", embeddings, {parameter.name for parameter in own})]
    for layer in _shown(experiment.model.n_layer):
        parameters = block_parameters(experiment.model, layer)
        names = {parameter.name for parameter in parameters}
        rows.append((f"layer {layer}", parameters, names if layer in layers_of(rank, experiment) else set()))
    for label, parameters, held in rows:
        if x == LEFT:
            drawing.text(0, y + 10, label, faint=True)
        for place, parameter in enumerate(filter(_is_drawn, parameters)):
            left = x + place * (TILE + 3)
            drawing.box(left, y, TILE, LAYER - 3)
            if parameter.name in held:
                part = part_of(parameter, kind, engine, experiment, device)
                _draw_part(drawing, left, y, part, KIND_COLOURS[kind])
        y += LAYER
    return y + 6


def tiles_in_words(experiment: Experiment) -> str:
    """The boxes of a row, from the left."""
    embeddings, _ = end_parameters(experiment.model)
    of_layer = filter(_is_drawn, block_parameters(experiment.model, 0))
    names = [parameter.name.removeprefix("blocks.0.").removesuffix(".weight") for parameter in of_layer]
    ends = [parameter.name for parameter in embeddings]
    return f"From the left: {', '.join(ends)}; in a layer {', '.join(names)}"


def _is_drawn(parameter: Parameter) -> bool:
    return parameter.is_matrix


def _draw_part(drawing: Drawing, x: float, y: float, part: HeldPart, shade: str) -> None:
    (top, bottom), (left, right) = part.rows, part.columns
    height = LAYER - 3
    drawing.box(
        x + left * TILE, y + top * height, (right - left) * TILE, (bottom - top) * height, colour=shade
    )


def _shown(layers: int) -> list[int]:
    """All layers, or so many of them, evenly."""
    count = min(layers, MOST_LAYERS)
    return [place * layers // count for place in range(count)]


def _slice(whole: Range, place: int, degree: int) -> Range:
    """The part number `place` of `degree` equal ones of a range."""
    begin, size = whole[0], (whole[1] - whole[0]) / degree
    return begin + place * size, begin + (place + 1) * size
