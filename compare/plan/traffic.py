"""What a device sends in a step, call by call: bytes of the ledger's closed forms, on the link of each axis.

    time of a call   latency x ceil(log2 n) + bytes on the wire / bandwidth

n devices along the axis. Bytes on the wire are a ring's, as the ledger counts them; trees and rings in both
directions take a message to n devices in log2 n hops. Calls follow from what is sent together: units of
parameters, buckets of gradients, regions of tp.
"""

import math
from collections.abc import Mapping

from msgspec import Struct

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    REPLICATED_GRADIENTS,
    ring_wire_bytes,
)
from compare.judge.closed_forms.communication import WIDE, Bytes, communication, microbatches_of, sums_again
from compare.judge.closed_forms.gradient_messages import gradient_messages
from compare.judge.strategy import with_remat_resolved
from compare.plan.machine import Machine
from compare.spec.axes import AXES, DP_REPLICATE, DP_SHARD, TP
from compare.spec.engines.registry import ENGINES, JAX
from compare.spec.experiment import Experiment, edited

NOTHING: Mapping[str, float] = {}
AT_MOST = "as wide as in float32: at most"


class AxisTraffic(Struct, frozen=True, kw_only=True):
    """Collectives of one kind, axis and purpose that a device takes part in, in a step."""

    kind: str
    axis: str
    purpose: str
    calls: float
    bytes: float
    """Logical bytes, of all calls together."""
    link: str
    seconds: float
    """Of all calls together, nothing beside them."""
    formula: str
    note: str = ""


def traffic_of(
    engine: str,
    experiment: Experiment,
    machine: Machine,
    *,
    stage: int = 0,
    scale: Mapping[str, float] = NOTHING,
) -> list[AxisTraffic]:
    """Collectives of one rank of the pipeline.

    Args:
        engine: a name in ENGINES.
        experiment: a checked one, that the engine accepts.
        machine: its links.
        stage: the rank.
        scale: by purpose, what the closed form's bytes are multiplied by: other widths, another model.
    """
    experiment = with_remat_resolved(engine, experiment)
    sizes, note = bytes_sent(engine, experiment, stage, wide=bool(scale)), AT_MOST if scale else ""
    return [
        timed(
            machine,
            experiment,
            key,
            size=size * scale.get(key[2], 1.0),
            calls=calls_of(engine, experiment, key, stage),
            note=note if key[1] == TP else "",
        )
        for key, size in sizes.items()
    ]


def bytes_sent(engine: str, experiment: Experiment, stage: int, *, wide: bool = False) -> Bytes:
    """The textbook's bytes of a layout; with `wide` all of it as wide as in float32."""
    if wide and experiment.precision.dtype not in WIDE:
        experiment = edited(experiment, {"precision": {"dtype": "float32"}})
    return communication(engine, experiment, stage=stage)


def timed(
    machine: Machine,
    experiment: Experiment,
    key: tuple[str, str, str],
    *,
    size: float,
    calls: float,
    note: str = "",
) -> AxisTraffic:
    """So many calls that send so many logical bytes together, on the link of their axis."""
    (kind, axis, purpose), layout = key, experiment.layout
    names = axis.split("+")
    degree = math.prod(layout.axes[name] for name in names)
    # Another axis may lie between those of a group: its members are then further apart.
    span = math.prod(layout.axes[name] for name in AXES[AXES.index(names[0]) :])
    link, rate, latency = machine.link_of(degree, span // degree)
    hops = 1 if kind == "permute" else math.ceil(math.log2(degree))
    wire = ring_wire_bytes(kind, round(size), degree)
    return AxisTraffic(
        kind=kind,
        axis=axis,
        purpose=purpose,
        calls=calls,
        bytes=size,
        link=link,
        seconds=calls * hops * latency + wire / rate,
        formula=f"{calls:g} calls x {hops} hops x {latency * 1e6:g} us + {wire / 1e6:,.1f} MB on the wire / "
        f"{rate / 1e9:.3g} GB/s {link} hosts, {degree} devices",
        note=note,
    )


def calls_of(engine: str, experiment: Experiment, key: tuple[str, str, str], stage: int) -> float:
    """Calls of a step: of units of parameters, of buckets of gradients, of regions of tp."""
    (kind, axis, purpose), layout = key, experiment.layout
    passes, blocks = microbatches_of(experiment), experiment.model.n_layer / layout.pp
    if axis == TP:
        if purpose == REPLICATED_GRADIENTS:
            return 1
        if purpose == LOSS:
            return passes
        again = 0.0
        if purpose == ACTIVATIONS and layout.remat in ("dots", "full"):
            share = 1.0 if kind == "all_gather" else sums_again(engine, experiment)
            again = 2 * blocks * share
        return passes * (2 * blocks + 1 + again)
    if axis == DP_SHARD:
        units = blocks + 1
        by_pass = ENGINES[engine].side == JAX.name and layout.zero > 1
        if purpose == PARAMETERS:
            return units * (2 * passes if layout.zero == 3 and layout.reshard_after_forward else 1)
        return units * (passes if by_pass else 1)
    if axis == DP_REPLICATE and purpose == GRADIENTS:
        try:
            messages = gradient_messages(engine, experiment, gradient_sync=layout.gradient_sync)
        except ValueError:  # padded leaves
            messages = None
        return messages.by_stage[stage] if messages else blocks + 1
    is_stream = purpose in (ACTIVATIONS, ACTIVATION_GRADIENTS)
    return passes * layout.chunks if is_stream else 1
