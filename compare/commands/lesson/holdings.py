"""Who holds what: each device's shard of every tensor and of the batch, and a figure of it.

The shards follow from the mesh axes (`compare.spec.axes`), the table of parameters with their logical axes,
and the stages of a pipeline. Tests compare them with the closed forms of memory.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from compare.commands.run.hosts import place_in_mesh
from compare.numerics.context import order_of_positions
from compare.numerics.parameters import Parameter, block_parameters, end_parameters, parameter_count
from compare.show.figures import COLOURS, WHOLE, WIDE, Axes, Figure, Range, strip_axes, tile
from compare.spec.axes import CP, DP_SHARD, EP, PP, ROWS, SHARDS, SPLIT, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment
from compare.theory.memory import KINDS, is_split_by, parameters_of_stage

OF_BATCH = "#CC79A7"
MOST_DEVICES, MOST_LAYERS = 8, 8
TILE, GAP = 0.88, 1.0
"""Width of a matrix's box, and of the space between two devices, in units of a matrix."""


class Shard(Struct, frozen=True):
    """A device's shard of a matrix: a range of rows and a range of columns."""

    rows: Range
    columns: Range

    @property
    def share(self) -> float:
        """Share of the matrix's elements."""
        return math.prod(end - begin for begin, end in (self.rows, self.columns))


def shard_of(parameter: Parameter, kind: str, engine: str, experiment: Experiment, device: int) -> Shard:
    """A device's shard of a parameter of its stage, of the gradient or of the moments (`kind` of `KINDS`).

    ep and tp split the side with their dims. ZeRO splits the other side, from the stage that the engine
    declares for this kind.
    """
    layout, at = experiment.layout, experiment.layout.coordinates(device)
    sides = sides_of(parameter)
    ranges, split = [WHOLE, WHOLE], set[int]()
    for axis in (EP, TP):
        for side, axes in enumerate(sides):
            if layout.axes[axis] > 1 and axis in map(SPLIT.get, axes):
                ranges[side] = _slice(ranges[side], at[axis], layout.axes[axis])
                split.add(side)
    if layout.zero >= ENGINES[engine].sharded_from[kind]:
        side = next((side for side in (0, 1) if side not in split and sides[side]), 1)
        for axis in (DP_SHARD,) if is_split_by(EP, parameter) else SHARDS:
            ranges[side] = _slice(ranges[side], at[axis], layout.axes[axis])
    return Shard(*ranges)


def sides_of(parameter: Parameter) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The logical axes of a matrix's rows and columns, of which the width is one; a vector is a row."""
    axes = parameter.axes
    if not parameter.is_matrix:
        return (), axes
    return (axes[:1], axes[1:]) if axes[0] == "embed" else (axes[:-1], axes[-1:])


def layers_of(rank: int, experiment: Experiment) -> set[int]:
    """The layers of a rank of the pipeline, whose stages are rank, rank + pp and so on."""
    layout, layers = experiment.layout, experiment.model.n_layer
    of_stage = layers // (layout.pp * layout.chunks)
    return {layer for layer in range(layers) if layer // of_stage % layout.pp == rank}


def share_of(kind: str, engine: str, experiment: Experiment, device: int) -> float:
    """A device's share of a kind, such as 0.25; more than 1 / pp if stages share an end of the model."""
    rank = experiment.layout.coordinates(device)[PP]
    own = parameters_of_stage(engine, experiment, stage=rank)
    elements = sum(p.size * shard_of(p, kind, engine, experiment, device).share for p in own)
    return elements / parameter_count(experiment.model)


def rows_of(device: int, experiment: Experiment) -> Range:
    """The rows of each batch that a device works on."""
    at, rows = experiment.layout.coordinates(device), WHOLE
    for axis in ROWS:
        rows = _slice(rows, at[axis], experiment.layout.axes[axis])
    return rows


def positions_of(device: int, experiment: Experiment) -> list[Range]:
    """The two chunks of each sequence that a device has, of 2 cp chunks."""
    layout = experiment.layout
    rank, parts = layout.coordinates(device)[CP], 2 * layout.cp
    return [_slice(WHOLE, part, parts) for part in order_of_positions(parts, layout)[2 * rank : 2 * rank + 2]]


def group_alike(engines: Iterable[str], experiment: Experiment) -> list[list[str]]:
    """The engines in groups with equal shards, in their order."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for engine in engines:
        able, layout = ENGINES[engine], experiment.layout
        at_ends = able.is_jax and layout.pp > 1
        parameters_split = layout.zero >= able.sharded_from["parameters"]
        groups.setdefault((at_ends, parameters_split), []).append(engine)
    return list(groups.values())


def figure(engines: Sequence[str], experiment: Experiment) -> Figure:
    """A column for each device, with its shard of the batch and of each matrix of each layer, by kind.

    The engines have equal shards: see `group_alike`.
    """
    layout, depth = experiment.layout, experiment.model.n_layer
    layers = [row * depth // min(depth, MOST_LAYERS) for row in range(min(depth, MOST_LAYERS))]
    embeddings, _ = end_parameters(experiment.model)
    matrices = [p for p in block_parameters(experiment.model, 0) if p.is_matrix]
    width = max(len(embeddings), len(matrices))
    shown = range(min(layout.devices, MOST_DEVICES))

    def draw(axes: Axes) -> None:
        labels, y = {2.5: "batch rows" + (", positions" if layout.cp > 1 else "")}, 0.0
        for device in shown:
            x, rank = device * (width + GAP), layout.coordinates(device)[PP]
            axes.text(x, 0.5, f"device {device}: {place_in_mesh(device, layout)}", va="center")
            for positions in positions_of(device, experiment):
                tile(axes, x, 2, width, TILE, [(rows_of(device, experiment), positions, OF_BATCH)])
            stage = {p.name for p in parameters_of_stage(engines[0], experiment, stage=rank)}
            y = 4.0
            for kind in KINDS:
                share = share_of(kind, engines[0], experiment, device)
                axes.text(x, y + 0.4, f"{kind}: {share:.0%}", va="center")
                rows = {"embeddings": [(p, p.name in stage) for p in embeddings]}
                for layer in layers:
                    rows[f"layer {layer}"] = [(p, layer in layers_of(rank, experiment)) for p in matrices]
                for label, parameters in rows.items():
                    y += 1
                    labels[y + 0.5] = label
                    for number, (parameter, is_here) in enumerate(parameters):
                        parts = []
                        if is_here:
                            shard = shard_of(parameter, kind, engines[0], experiment, device)
                            parts = [(shard.rows, shard.columns, COLOURS[kind])]
                        tile(axes, x + number, y, TILE, TILE, parts)
                y += 1.5
        axes.set(xlim=(-0.1, len(shown) * (width + GAP)), ylim=(y, 0))
        strip_axes(axes, labels)

    names = [p.name.removeprefix("blocks.0.").removesuffix(".weight") for p in matrices]
    more = f" And {layout.devices - len(shown)} devices more." if layout.devices > len(shown) else ""
    return Figure(
        title=f"Who holds what: {', '.join(engines)}",
        caption=f"From the left: {', '.join(p.name for p in embeddings)}; in a layer {', '.join(names)}. "
        f"Filled is what a device keeps: parameters and optimizer state between two steps, gradients until "
        f"the update.{more}",
        draw=draw,
        width=WIDE,
        height=0.16 * (3 * (len(layers) + 3) + 3),
    )


def _slice(whole: Range, place: int, degree: int) -> Range:
    """Part `place` of `degree` equal parts of a range."""
    begin, size = whole[0], (whole[1] - whole[0]) / degree
    return begin + place * size, begin + (place + 1) * size
