"""Step time of a layout on a machine, as a sum of terms.

compute       `compute`: a device's own work
collectives   the textbook's bytes, as a ring sends them, over the bandwidth of each axis's link. What runs
              beside compute is hidden as far as there is compute. Latency is not in it: in no published row
              is it more than a hundredth
pipeline      the schedule carried out with these times (`compare.pipeline.simulator`)
"""

import functools
import math
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    ring_wire_bytes,
)
from compare.pipeline.schedules import Kind, make_schedule
from compare.pipeline.simulator import prerequisites, run
from compare.plan.compute import (
    GPT,
    Part,
    Setting,
    Term,
    Variant,
    block_terms,
    head_terms,
    shape_of,
    update_terms,
)
from compare.plan.machine import Machine
from compare.spec.axes import (
    AXES,
    CP,
    DATA,
    DP_SHARD,
    EP,
    PP,
    REPLICAS,
    SHARDED_FROM,
    SHARDS,
    TP,
    joined_of,
    parts_of,
)
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError
from compare.theory.communication import communication
from compare.theory.memory import parameters_of_stage

LATER = (1.1, 1.65)
"""Published steps over predicted ones, the medians of tables of H100s and TPUs. Products as fast as anybody
measured them are optimistic; how far software stays behind them differs more than layouts do."""
CALIBRATED = (0.88, 1.12)
"""The same once one row of a table has set `Machine.slowdown`: the others were 6 to 11 % off in the mean."""
WIDE = {"float64": 8.0, "float32": 4.0}
STREAMS, OF_DP = (ACTIVATIONS, ACTIVATION_GRADIENTS), (GRADIENTS, PARAMETERS)


class Prediction(Struct, frozen=True, kw_only=True):
    """The predicted step of one layout."""

    terms: list[Term]
    mfu: float
    """Share of the peak of all devices."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(term.seconds for term in self.terms)

    def of_part(self, part: Part) -> float:
        """Seconds of one part."""
        return sum(term.seconds for term in self.terms if term.part == part)


class Traffic(Struct, frozen=True, kw_only=True):
    """Collectives of one kind, axis and purpose that a device takes part in, in a step."""

    kind: str
    axis: str
    purpose: str
    bytes: float
    """Logical bytes."""
    seconds: float
    """With nothing beside them."""


def setting_of(engine: str, experiment: Experiment, machine: Machine, **given: Any) -> Setting:
    """A layout on a machine, in the way of one of our engines but for the fields that are given.

    On a CPU devices share the cores, so that nothing is hidden. Elsewhere gradients are, but those that leave
    after backward (naive, flat), parameters that ZeRO-3 gathers, and a ring's hops; sums over tp never are.
    """
    layout, dtype, spec = experiment.layout, experiment.precision.dtype, ENGINES[engine]
    is_late = spec.offers_choice and layout.gradient_sync in ("naive", "flat")
    shards = {DP_SHARD, joined_of(SHARDS, layout.axes)}
    together = {joined_of(names, layout.axes) for names in (REPLICAS, DATA)}
    hidden = {f"{axis} {GRADIENTS}" for axis in (shards if is_late else shards | together)}
    hidden |= {f"{CP} {purpose}" for purpose in STREAMS if layout.context == "ring"}
    if layout.zero == SHARDED_FROM["parameters"]:
        hidden |= {f"{axis} {PARAMETERS}" for axis in shards}
    ways: dict[str, Any] = {
        "shape": shape_of(experiment.model),
        "number": WIDE.get(dtype, 2.0),
        "stream": WIDE.get(dtype, 4.0),
        "fused": spec.holds.residuals != "scan",
        "hidden": frozenset() if machine.platform == "cpu" else frozenset(hidden),
        "remat": spec.remat_for(layout),
        "casts": dtype not in WIDE,
    }
    return Setting(engine=engine, experiment=experiment, machine=machine, **ways | given)


def predict(engine: str, experiment: Experiment, machine: Machine, **given: Any) -> Prediction:
    """The time of a step: that of the pipeline's last rank, which has the head.

    The layout uses all devices of the machine. `given` are fields of `Setting`; by default the engine's ways.
    Raises ExperimentError: the machine has no peak for this dtype.
    """
    setting = setting_of(engine, experiment, machine, **given)
    traffic = traffic_of(setting)
    blocks, head = block_terms(setting), head_terms(setting)
    # A sum over tp runs beside products at best, and a ring's hop beside the attention to what came before.
    # Tokens on their way to experts and back wait for nothing, and nothing else is there to be done.
    windows: dict[Part, float] = {TP: 3 * setting.block_product_s(), EP: 0.0, CP: sum(setting.attention_s())}
    sums = [
        _term(axis, sent, _exposed(setting, sent, window), forward=float(sent.purpose in (ACTIVATIONS, LOSS)))
        for axis, seconds in windows.items()
        for window in [setting.blocks * seconds / 2]
        for sent in traffic
        if sent.axis == axis and sent.purpose not in OF_DP
    ]
    terms = [*blocks, *head, *sums]
    if experiment.layout.pp > 1:
        along = [sent for sent in traffic if sent.axis == PP]
        terms += _pipeline(setting, [*blocks, *sums], head, along)
    compute = sum(term.seconds for term in (*blocks, *head))
    terms += [
        _term("dp", sent, _exposed(setting, sent, _window(setting, sent, compute)))
        for sent in traffic
        if sent.purpose in OF_DP
    ]
    terms += update_terms(setting, stage=experiment.layout.pp - 1)
    terms = [term for term in terms if term.seconds]
    flops = setting.shape.flops_per_token * experiment.tokens_per_step
    seconds = sum(term.seconds for term in terms)
    return Prediction(terms=terms, mfu=flops / seconds / machine.devices / setting.peak)


def ways_of(engine: str, experiment: Experiment, variant: Variant) -> dict[str, Any]:
    """Fields of `Setting` for a model of other sizes: its shape, and what bytes of its weights grow by."""
    if variant == GPT:
        return {}
    shape, layout = shape_of(experiment.model, variant), experiment.layout
    held = parameters_of_stage(engine, experiment, stage=layout.pp - 1)
    ends = shape.vocabulary * shape.width * (2 if variant.untied and layout.pp == 1 else 1)
    weights = shape.layers / layout.pp * shape.block_parameters + ends
    grown = weights / sum(parameter.size for parameter in held)
    return {"shape": shape, "scale": dict.fromkeys(("weights", PARAMETERS, GRADIENTS), grown)}


def slowdown_by(
    engine: str, experiment: Experiment, machine: Machine, *, seconds: float, **given: Any
) -> float:
    """`Machine.slowdown` under which this step takes so long.

    Raises ExperimentError: no compute does, beside what is sent.
    """

    def predicted(slowdown: float) -> float:
        return predict(engine, experiment, replace(machine, slowdown=slowdown), **given).seconds

    low, high = 1e-3, 1e3
    if not predicted(low) < seconds < predicted(high):
        least = f"what it sends alone takes {predicted(low) * 1e3:,.3g} ms"
        raise ExperimentError(f"--measured: no compute takes {seconds * 1e3:,.3g} ms a step: {least}")
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted(middle) < seconds else (low, middle)
    return high


def traffic_of(setting: Setting) -> list[Traffic]:
    """Collectives of the pipeline's last rank, by the textbook."""
    engine, stage, scale = setting.engine, setting.experiment.layout.pp - 1, setting.scale
    found = []
    for (kind, axis, purpose), size in communication(engine, setting.experiment, stage=stage).items():
        sent = size * scale.get(purpose, 1.0)
        seconds = transfer_s(setting, kind, axis, size=sent)
        found.append(Traffic(kind=kind, axis=axis, purpose=purpose, bytes=sent, seconds=seconds))
    return found


def transfer_s(setting: Setting, kind: str, axis: str, *, size: float) -> float:
    """Seconds of collectives that send so many logical bytes together, on the link of their axis."""
    sizes, names = setting.experiment.layout.axes, parts_of(axis)
    degree = math.prod(sizes[name] for name in names)
    # Another axis may lie between those of a group: its members are then further apart.
    span = math.prod(sizes[name] for name in AXES[AXES.index(names[0]) :])
    return ring_wire_bytes(kind, round(size), degree) / setting.machine.link_of(degree, span // degree)


def _exposed(setting: Setting, collective: Traffic, window: float) -> float:
    """Seconds of collectives that nothing hides: what the window has no room for."""
    if setting.hidden.isdisjoint({collective.axis, f"{collective.axis} {collective.purpose}"}):
        return collective.seconds
    return max(collective.seconds - window, 0.0)


def _window(setting: Setting, collective: Traffic, compute: float) -> float:
    """Seconds of compute beside which collectives of gradients or parameters may run.

    Gathers for each forward and backward run beside all compute, those of a step beside its first forward;
    reductions beside the backward of the last pass, or of each, where each reduces.
    """
    layout, passes = setting.experiment.layout, setting.passes
    if collective.purpose == PARAMETERS:
        again = layout.zero == SHARDED_FROM["parameters"] and layout.reshard_after_forward
        return compute if again else compute / 3 / passes
    by_pass = ENGINES[setting.engine].sends.scatters_each_pass and layout.zero >= SHARDED_FROM["gradients"]
    return compute * 2 / 3 / (1 if by_pass else passes)


def _term(part: Part, collective: Traffic, seconds: float, *, forward: float = 0.0) -> Term:
    label = f"{collective.kind.replace('_', '-')} of {collective.purpose} over {collective.axis}"
    return Term(part=part, label=label, seconds=seconds, forward=forward)


def _pipeline(setting: Setting, inner: list[Term], head: list[Term], traffic: list[Traffic]) -> list[Term]:
    """How much later the schedule ends than the last rank's own work, and what else goes along pp."""
    layout, passes = setting.experiment.layout, setting.passes
    tasks = passes * layout.chunks
    forward = sum(term.seconds * term.forward for term in inner) / tasks
    backward = sum(term.seconds * (1 - term.forward) for term in inner) / tasks
    last = sum(term.seconds for term in head) / passes
    streams = [collective for collective in traffic if collective.purpose in STREAMS]
    message = max((collective.seconds / tasks for collective in streams), default=0.0)
    of_layout = (layout.schedule, layout.pp, passes, layout.chunks)
    end = makespan_s(*of_layout, forward=forward, backward=backward, last=last, message=message)
    bubble = end - tasks * (forward + backward) - passes * last
    others = [
        _term(PP, collective, collective.seconds) for collective in traffic if collective not in streams
    ]
    return [Term(part=PP, label=f"bubble of {layout.schedule}", seconds=bubble), *others]


def makespan_s(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    *,
    forward: float,
    backward: float,
    last: float,
    message: float,
) -> float:
    """When a schedule ends, from the seconds of a stage and of a message between two ranks.

    `last` are more seconds of a microbatch on the last stage, a third of them forward.
    """
    halves = dict.fromkeys((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), (backward / 2, last / 3))
    times = {Kind.FORWARD: (forward, last / 3), Kind.BACKWARD: (backward, 2 * last / 3), **halves}
    clock, ended = [0.0] * ranks, list[float]()
    for rank, kind, is_last, needs in _in_order(schedule, ranks, microbatches, chunks):
        inner, more = times[kind]
        ready = (ended[place] + message * is_elsewhere for place, is_elsewhere in needs)
        clock[rank] = max([clock[rank], *ready]) + inner + more * is_last
        ended.append(clock[rank])
    return max(clock)


@functools.lru_cache(maxsize=256)
def _in_order(
    schedule: str, ranks: int, microbatches: int, chunks: int
) -> list[tuple[int, Kind, bool, list[tuple[int, bool]]]]:
    """The tasks of a schedule, each behind what it waits for.

    Of each its rank, its kind, whether it is of the last stage; and of what it waits for the places in this
    list, and whether it is on another rank. A search carries out the same few schedules with many times.
    """
    stages = ranks * chunks
    slots = run(make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks))
    places = {slot.task: place for place, slot in enumerate(slots)}
    return [
        (
            rank,
            task.kind,
            task.stage == stages - 1,
            [(places[need], need.stage % ranks != rank) for need in prerequisites(task, stages)],
        )
        for rank, task, *_ in slots
    ]
