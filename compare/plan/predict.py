"""Step time of a layout on a machine, as a sum of terms: each has its seconds and the formula they are from.

compute       `compute`: a device's own work
collectives   `traffic`. What runs beside compute is hidden as far as there is compute, but for one call:
              of gathers the first, of reductions the last
pipeline      the schedule carried out with these times (`compare.pipeline.simulator`)
"""

import functools

import msgspec
from msgspec import Struct

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, GRADIENTS, PARAMETERS
from compare.pipeline.schedules import Kind, Task, make_schedule
from compare.pipeline.simulator import run
from compare.plan.compute import Part, Setting, Term, Ways, head_and_loss, own_work, update
from compare.plan.machine import Machine
from compare.plan.traffic import AxisTraffic, traffic_of
from compare.plan.work import Shape, shape_of
from compare.spec.axes import DP_REPLICATE, DP_SHARD, PP, SHARDED_FROM, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment

PARTS: dict[Part, str] = {
    "products": "products",
    "attention": "attention",
    "vectors": "vectors",
    "recomputed": "again",
    "tensor": TP,
    "pipeline": PP,
    "data": "dp",
    "update": "update",
}
"""What a step's time is spent on, in a word; of collectives, what nothing hides."""
WIDE = {"float64": 8.0, "float32": 4.0}
STREAMS = (ACTIVATIONS, ACTIVATION_GRADIENTS)


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


def ways_of(engine: str, experiment: Experiment, machine: Machine) -> Ways:
    """The ways of one of our engines.

    On a CPU devices share the cores, so that nothing is hidden. Elsewhere gradients are, but those that leave
    after backward (naive, flat), and parameters that ZeRO-3 gathers; sums over tp never are.
    """
    layout, dtype, own = experiment.layout, experiment.precision.dtype, ENGINES[engine]
    is_late = own.offers_choice and layout.gradient_sync in ("naive", "flat")
    hidden = {f"{DP_SHARD} {GRADIENTS}"} | (set() if is_late else {f"{DP_REPLICATE} {GRADIENTS}"})
    hidden |= {f"{DP_SHARD} {PARAMETERS}"} if layout.zero == SHARDED_FROM["parameters"] else set()
    return Ways(
        number=WIDE.get(dtype, 2.0),
        stream=WIDE.get(dtype, 4.0),
        fused=own.holds.residuals != "scan",
        hidden=frozenset() if machine.platform == "cpu" else frozenset(hidden),
        remat=msgspec.convert(own.remat_for(layout), Ways.__annotations__["remat"]),
        casts=dtype not in WIDE,
    )


def predict(
    engine: str,
    experiment: Experiment,
    machine: Machine,
    *,
    ways: Ways | None = None,
    shape: Shape | None = None,
) -> Prediction:
    """The time of a step: that of the pipeline's last rank, which has the head.

    Args:
        engine: a name in ENGINES.
        experiment: a checked one that the engine accepts; its layout uses all devices of the machine.
        machine: which has a peak for its dtype.
        ways: of the engine, by default.
        shape: of nanoGPT's model, by default.

    Raises:
        ExperimentError: the machine has no peak for this dtype.
        ValueError: the layout has no closed form of what it sends.
    """
    setting = Setting(
        engine=engine,
        experiment=experiment,
        machine=machine,
        ways=ways or ways_of(engine, experiment, machine),
        shape=shape or shape_of(experiment.model),
    )
    last = experiment.layout.pp - 1
    traffic = traffic_of(engine, experiment, machine, stage=last, scale=setting.ways.scale)
    blocks, head = own_work(setting), head_and_loss(setting)
    tensor = [_tensor(setting, one) for one in traffic if one.axis == TP]
    terms = [*blocks, *head, *tensor]
    if experiment.layout.pp > 1:
        terms += _pipeline(setting, [*blocks, *tensor], head, [one for one in traffic if one.axis == PP])
    compute = sum(term.seconds for term in (*blocks, *head))
    terms += [_data(setting, one, compute) for one in traffic if not {TP, PP} & {*one.axis.split("+")}]
    terms = [term for term in (*terms, *update(setting, stage=last)) if term.seconds]
    flops = setting.shape.flops_per_token * experiment.tokens_per_step
    seconds = sum(term.seconds for term in terms)
    return Prediction(terms=terms, mfu=flops / seconds / machine.devices / setting.peak)


def _exposed(setting: Setting, one: AxisTraffic, window: float) -> float:
    """Seconds of collectives that nothing hides: what the window has no room for, and one call."""
    if setting.ways.hidden.isdisjoint({one.axis, f"{one.axis} {one.purpose}"}):
        return one.seconds
    return min(max(one.seconds - window, 0.0) + one.seconds / max(one.calls, 1.0), one.seconds)


def _term(part: Part, one: AxisTraffic, seconds: float, *, forward: float = 0.0) -> Term:
    hidden = f"; {(one.seconds - seconds) * 1e3:,.2f} ms of it hidden" if seconds < one.seconds else ""
    note = f" ({one.note})" if one.note else ""
    what = f"{one.kind.replace('_', '-')} of {one.purpose} over {one.axis}"
    return Term(
        part=part, what=what, seconds=seconds, forward=forward, formula=f"{one.formula}{hidden}{note}"
    )


def _tensor(setting: Setting, one: AxisTraffic) -> Term:
    """Sums over tp: between products, which wait for them, unless an engine cuts both into pieces."""
    compute = 3 * setting.blocks * setting.block_product_s()
    forward = float(one.purpose in (ACTIVATIONS, "loss"))
    return _term("tensor", one, _exposed(setting, one, compute / 2), forward=forward)


def _data(setting: Setting, one: AxisTraffic, compute: float) -> Term:
    """Gathers for each forward and backward run beside all compute, those of a step beside its first forward.

    Reductions run beside the backward of the last pass, or of each, where each reduces.
    """
    layout, passes = setting.experiment.layout, setting.passes
    by_pass = one.calls > setting.shape.layers / layout.pp + 1
    if one.purpose == PARAMETERS:
        again = layout.zero == SHARDED_FROM["parameters"] and layout.reshard_after_forward
        window = compute if again else compute / 3 / passes
    else:
        window = compute * 2 / 3 / (1 if by_pass else passes)
    return _term("data", one, _exposed(setting, one, window))


def _pipeline(
    setting: Setting, inner: list[Term], head: list[Term], traffic: list[AxisTraffic]
) -> list[Term]:
    """How much later the schedule ends than the last rank's own work, and what else goes along pp."""
    layout, passes = setting.experiment.layout, setting.passes
    tasks = passes * layout.chunks
    forward = sum(term.seconds * term.forward for term in inner) / tasks
    backward = sum(term.seconds * (1 - term.forward) for term in inner) / tasks
    last = sum(term.seconds for term in head) / passes
    streams = [one for one in traffic if one.purpose in STREAMS and one.calls]
    message = max((one.seconds / one.calls for one in streams), default=0.0)
    of_layout = (layout.schedule, layout.pp, passes, layout.chunks)
    end = makespan_s(*of_layout, forward=forward, backward=backward, last=last, message=message)
    own = tasks * (forward + backward) + passes * last
    said = (
        f"{layout.schedule} of {layout.pp} ranks, {passes} microbatches: forward {forward * 1e3:,.3f} ms, "
        f"backward {backward * 1e3:,.3f} ms, head {last * 1e3:,.3f} ms, message {message * 1e6:,.0f} us; it "
        f"ends after {end * 1e3:,.2f} ms, of which {own * 1e3:,.2f} ms are work"
    )
    bubble = Term(part="pipeline", what="bubble", seconds=end - own, formula=said)
    return [bubble, *(_term("pipeline", one, one.seconds) for one in traffic if one not in streams)]


@functools.lru_cache(maxsize=4096)
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
    """When a schedule ends.

    Args:
        schedule, ranks, microbatches, chunks: as of `make_schedule`.
        forward, backward: seconds of a stage.
        last: more seconds of a microbatch on the last stage, a third of them forward.
        message: seconds from one rank to another.
    """
    stages = ranks * chunks
    plan = make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    share = {Kind.FORWARD: 1 / 3, Kind.BACKWARD: 2 / 3}
    inner = {Kind.FORWARD: forward, Kind.BACKWARD: backward}

    def seconds(task: Task) -> float:
        more = last if task.stage == stages - 1 else 0.0
        return inner.get(task.kind, backward / 2) + more * share.get(task.kind, 1 / 3)

    return max(slot.end for slot in run(plan, seconds, message=message))
