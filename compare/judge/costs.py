"""Costs of a run, reduced to the figures of the table: time, memory, communication."""

import math
import statistics

from msgspec import UNSET, Struct, UnsetType, field

from compare.contract.communication import of_busiest_stage
from compare.contract.record import Record, Step
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.peaks import model_flops_utilization
from compare.judge.strategy import done_words


class Cost(Struct, frozen=True, kw_only=True):
    """One engine's row of the table. Times are of steady steps: not the first, nor one that was watched."""

    engine: str
    devices: int
    gradient_sync: str
    """Gradient synchronisation as observed (`judge.strategy`)."""
    remat: str
    compiled: str = ""
    """What compiled the step: see `Work.compiled`."""
    final_loss: float
    mean_loss: float
    """Over all steps, in nats."""
    validation_loss: float | UnsetType = UNSET
    """Loss of the last evaluation; unset without evaluations."""
    best_validation_loss: float | UnsetType = UNSET
    skipped_steps: str = ""
    """Number of skipped steps and the last loss scale; empty without a loss scale."""
    step_time_ms_median: float
    step_time_ms_p95: float
    tokens_per_s: float
    """Over all devices, at the median step time."""
    tokens_seen: int = 0
    """In all steps of this run."""
    model_flops_per_s: float = 0.0
    """Floating-point operations of the model a second, over all devices; none that is computed anew."""
    mfu: float | UnsetType = UNSET
    """`model_flops_per_s` as a fraction of the devices' peak; unset where no vendor gives a peak."""
    compile_s: float
    first_step_s: float
    cpu_time_s: float
    """CPU seconds of all the engine's processes, start-up and compilation included."""
    peak_mem_bytes: int
    """The largest of all devices."""
    comm_calls: int
    """Collectives that one device takes part in, per step; of a pipeline one of the busiest stage."""
    comm_bytes: int
    """Logical bytes per step: the full tensors."""
    comm_wire_bytes: int
    """Bytes one device sends per step on a ring."""
    resident_bytes: dict[str, list[int]] = field(default_factory=dict)
    """At rest, per device: see `Manifest.resident_bytes`."""


def steady_steps(record: Record) -> list[Step]:
    """The steps whose time counts: not the first, nor one that was watched; all where a run has no other."""
    watched = record.timeline.step if record.timeline else None
    steady = [step for step in record.steps[1:] if not step.instrumented and step.step != watched]
    return steady or record.steps


def steady_times_ms(record: Record) -> list[float]:
    """Wall times of the steady steps."""
    return [step.step_time_ms for step in steady_steps(record)]


def cost_of(record: Record) -> Cost:
    """Reduce a record to its row of the table."""
    manifest, times_ms, done = record.manifest, steady_times_ms(record), done_words(record)
    sent = of_busiest_stage(record.ledger.rows)
    median_ms = statistics.median(times_ms)
    tokens_per_s = manifest.experiment.tokens_per_step / (median_ms / 1000)
    mfu = model_flops_utilization(manifest, tokens_per_s)
    return Cost(
        engine=manifest.engine,
        devices=manifest.devices,
        gradient_sync=done.gradient_sync,
        remat=done.remat,
        compiled=done.compiled,
        final_loss=record.steps[-1].loss,
        mean_loss=statistics.fmean(step.loss for step in record.steps),
        validation_loss=record.evaluations[-1].validation if record.evaluations else UNSET,
        best_validation_loss=min((one.validation for one in record.evaluations), default=UNSET),
        skipped_steps=_skipped_steps(record.steps),
        step_time_ms_median=median_ms,
        step_time_ms_p95=sorted(times_ms)[math.ceil(0.95 * (len(times_ms) - 1))],
        tokens_per_s=tokens_per_s,
        tokens_seen=len(record.steps) * manifest.experiment.tokens_per_step,
        model_flops_per_s=model_flops_per_token(manifest.experiment) * tokens_per_s,
        mfu=UNSET if mfu is None else mfu,
        compile_s=manifest.compile_s,
        first_step_s=manifest.first_step_s,
        cpu_time_s=manifest.cpu_time_s,
        peak_mem_bytes=max(manifest.peak_memory_bytes),
        comm_calls=sum(row.calls for row in sent),
        comm_bytes=sum(row.bytes for row in sent),
        comm_wire_bytes=sum(row.wire_bytes for row in sent),
        resident_bytes=manifest.resident_bytes,
    )


def _skipped_steps(steps: list[Step]) -> str:
    scale = steps[-1].loss_scale
    return "" if scale is UNSET else f"{sum(step.skipped for step in steps)}, {scale:g}"
