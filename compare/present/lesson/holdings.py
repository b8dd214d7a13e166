"""Who holds what: each device's part of every tensor and of the batch, and a picture of it.

The parts follow from the declarations that everything else reads: the mesh axes with what each splits
(`compare.spec.axes`), the table of parameters with the meaning of each dim, and the stages of a pipeline.
Tests hold them to the closed forms of memory.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from compare.judge.closed_forms.memory import KINDS, parameters_of_stage
from compare.numerics.parameters import Parameter, block_parameters, end_parameters, parameter_count
from compare.present.hosts import coordinates
from compare.show.figures import COLOURS, INK, WIDE, Figure
from compare.spec.axes import DP_SHARD, PP, ROWS, SPLIT, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Range = tuple[float, float]
"""Begin and end along one side, as fractions of it."""
WHOLE: Range = (0.0, 1.0)
OF_BATCH = "#CC79A7"
MOST_DEVICES, MOST_LAYERS = 8, 8
TILE, GAP = 0.88, 1.0
"""Of a matrix's place: its box; and between two devices, in places."""


class HeldPart(Struct, frozen=True):
    """What a device holds of a matrix: a range of its rows and one of its columns."""

    rows: Range
    columns: Range

    @property
    def share(self) -> float:
        """Of the matrix's elements."""
        return math.prod(end - begin for begin, end in (self.rows, self.columns))


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
    layout, at = experiment.layout, coordinates(device, experiment.layout)
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
    rank = coordinates(device, experiment.layout)[PP]
    own = parameters_of_stage(engine, experiment, stage=rank)
    held = sum(p.size * part_of(p, kind, engine, experiment, device).share for p in own)
    return held / parameter_count(experiment.model)


def rows_of(device: int, experiment: Experiment) -> Range:
    """The rows of each batch that a device works on."""
    at, rows = coordinates(device, experiment.layout), WHOLE
    for axis in ROWS:
        rows = _slice(rows, at[axis], experiment.layout.axes[axis])
    return rows


def alike(engines: Sequence[str], experiment: Experiment) -> list[list[str]]:
    """The engines in groups that hold the same, in the order in which they are given."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for engine in engines:
        own = ENGINES[engine].holds
        at_ends = own.ends_on_every_stage and experiment.layout.pp > 1
        parameters_split = experiment.layout.zero >= own.sharded_from["parameters"]
        groups.setdefault((at_ends, parameters_split), []).append(engine)
    return list(groups.values())


def figure(engines: Sequence[str], experiment: Experiment) -> Figure:
    """A column for each device: its rows of the batch, and its part of each matrix of each layer, by kind.

    Args:
        engines: that hold the same: `alike`.
        experiment: its layout.
    """
    layers, devices = _shown(experiment.model.n_layer), min(experiment.layout.devices, MOST_DEVICES)
    (embeddings, _), blocks = end_parameters(experiment.model), block_parameters(experiment.model, 0)
    of_layer = [p.name.removeprefix("blocks.0.").removesuffix(".weight") for p in blocks if p.is_matrix]
    more = experiment.layout.devices - devices
    return Figure(
        title=f"Who holds what: {', '.join(engines)}",
        caption=f"From the left: {', '.join(p.name for p in embeddings)}; in a layer {', '.join(of_layer)}. "
        f"Filled is what a device keeps: parameters and optimizer state between two steps, gradients until "
        f"the update.{f' And {more} devices more.' if more else ''}",
        draw=lambda axes: _draw(axes, engines[0], experiment, layers, devices),
        width=WIDE,
        height=0.16 * (3 * (len(layers) + 3) + 3),
    )


def _draw(axes: "Axes", engine: str, experiment: Experiment, layers: Sequence[int], devices: int) -> None:
    embeddings, _ = end_parameters(experiment.model)
    matrices = [p for p in block_parameters(experiment.model, 0) if p.is_matrix]
    width = max(len(embeddings), len(matrices))
    labels: dict[float, str] = {2.5: "batch rows"}
    for device in range(devices):
        x, at = device * (width + GAP), coordinates(device, experiment.layout)
        begin, end = rows_of(device, experiment)
        _box(axes, x, 2, width, WHOLE, WHOLE, "none")
        _box(axes, x, 2, width, WHOLE, (begin, end), OF_BATCH)
        stage = {p.name for p in parameters_of_stage(engine, experiment, stage=at[PP])}
        y = 4.0
        for kind in KINDS:
            axes.text(x, y + 0.4, f"{kind}: {share_of(kind, engine, experiment, device):.0%}", va="center")
            y += 1
            rows = [("embeddings", [(p, p.name in stage) for p in embeddings])]
            mine = layers_of(at[PP], experiment)
            rows += [(f"layer {layer}", [(p, layer in mine) for p in matrices]) for layer in layers]
            for label, parameters in rows:
                labels[y + 0.5] = label
                for number, (parameter, is_here) in enumerate(parameters):
                    _box(axes, x + number, y, TILE, WHOLE, WHOLE, "none")
                    if is_here:
                        part = part_of(parameter, kind, engine, experiment, device)
                        _box(axes, x + number, y, TILE, part.rows, part.columns, COLOURS[kind])
                y += 1
            y += 0.5
    axes.set(xlim=(-0.1, devices * (width + GAP)), ylim=(y, 0), xticks=[])
    axes.set_yticks(list(labels), list(labels.values()), fontsize="small")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _box(axes: "Axes", x: float, y: float, width: float, rows: Range, columns: Range, shade: str) -> None:
    """A part of a box of one unit's height, or its outline."""
    (top, bottom), (left, right) = rows, columns
    edge = INK if shade == "none" else "none"
    axes.broken_barh(
        [(x + left * width, (right - left) * width)],
        (y + top * TILE, (bottom - top) * TILE),
        facecolor=shade,
        edgecolor=edge,
        linewidth=0.5,
    )


def _shown(layers: int) -> list[int]:
    """All layers, or so many of them, evenly."""
    count = min(layers, MOST_LAYERS)
    return [place * layers // count for place in range(count)]


def _slice(whole: Range, place: int, degree: int) -> Range:
    """The part number `place` of `degree` equal ones of a range."""
    begin, size = whole[0], (whole[1] - whole[0]) / degree
    return begin + place * size, begin + (place + 1) * size
