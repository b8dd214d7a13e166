"""Figures of a run. Studies keep them, tables show them, and `shardpair diff` compares them."""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import UNSET

from compare.contract.communication import of_busiest_stage
from compare.contract.record import Record
from compare.judge.textbook import line_up
from compare.spec.engines.registry import STUDIED
from compare.text import human_bytes
from compare.theory.communication import is_plain
from compare.theory.flops import flops_utilization, model_flops_per_token


class Metric(NamedTuple):
    """A figure of a run, which is a row of tables."""

    key: str
    label: str
    form: str | Callable[[Any], str] = ""
    has_ratio: bool = False
    """A page shows its ratio to the first case."""


METRICS = (
    Metric("continued", "stopped, and continued at step"),
    Metric("gradient_sync", "gradient synchronisation"),
    Metric("remat", "recomputed in backward"),
    Metric("attention", "attention weights at a time"),
    Metric("compiled", "compiled by"),
    Metric("final_loss", "final loss (nats)", ".4f"),
    Metric("mean_loss", "mean loss (nats)", ".4f"),
    Metric("validation_loss", "validation loss (nats)", ".4f"),
    Metric("best_validation_loss", "best validation loss (nats)", ".4f"),
    Metric("skipped_steps", "steps skipped, last loss scale"),
    Metric("step_time_ms_median", "step time, median (ms)", ".1f", True),
    Metric("step_time_ms_p95", "step time, p95 (ms)", ".1f", True),
    Metric("tokens_per_s", "tokens/s, at the median step", ",.0f", True),
    Metric("tokens_seen", "tokens seen", ",.0f"),
    Metric("model_flops_per_s", "GFLOP/s of the model", lambda flops: f"{flops / 1e9:,.1f}"),
    Metric("mfu", "MFU, of the devices' peak", ".1%"),
    Metric("compile_s", "compilation, or cache read (s)", ".2f"),
    Metric("first_step_s", "first step (s)", ".2f"),
    Metric("cpu_time_s", "CPU time, all in all (s)", ".1f", True),
    Metric("peak_mem_bytes", "peak memory per device", human_bytes, True),
    Metric("comm_calls", "collectives per step", ",.0f", True),
    Metric("comm_bytes", "communicated per step", human_bytes, True),
)

MANY = 20
"""Least number of steps of which a p95 is shown."""


def figures(record: Record) -> dict[str, Any]:
    """A run's figures by key of METRICS, and those that tables add up; without figures that it lacks.

    Times are of steady steps. Communication is in logical bytes, of a device of the busiest stage. Settings
    (gradient_sync, remat, compiled) are in `Alone.settings`. A run that was stopped lacks its CPU time.
    """
    manifest, steps = record.manifest, record.steps
    times_ms = steady_times_ms(record)
    sent = of_busiest_stage(record.ledger.rows)
    validation = [one.validation for one in record.evaluations]
    median_ms, many = statistics.median(times_ms), len(times_ms) >= MANY
    tokens_per_s = manifest.experiment.tokens_per_step / (median_ms / 1000)
    scale = steps[-1].loss_scale
    continued = record.request.next_step if record.request and record.request.continues else None
    values = {
        "devices": manifest.devices,
        "continued": continued,
        "final_loss": steps[-1].loss,
        "mean_loss": statistics.fmean(step.loss for step in steps),
        "validation_loss": validation[-1] if validation else None,
        "best_validation_loss": min(validation, default=None),
        "skipped_steps": None if scale is UNSET else f"{sum(s.skipped for s in steps)}, {scale:g}",
        "step_time_ms_median": median_ms,
        "step_time_ms_p95": sorted(times_ms)[math.ceil(0.95 * (len(times_ms) - 1))] if many else None,
        "tokens_per_s": tokens_per_s,
        "tokens_seen": len(steps) * manifest.experiment.tokens_per_step,
        "model_flops_per_s": model_flops_per_token(manifest.experiment) * tokens_per_s,
        "mfu": flops_utilization(manifest.experiment, manifest.device_kind, tokens_per_s),
        "compile_s": manifest.compile_s,
        "first_step_s": manifest.first_step_s,
        "cpu_time_s": manifest.cpu_time_s if continued is None else None,
        "peak_mem_bytes": max(manifest.peak_memory_bytes),
        "comm_calls": sum(row.calls for row in sent),
        "comm_bytes": sum(row.bytes for row in sent),
        "comm_wire_bytes": sum(row.wire_bytes for row in sent),
        "comm_of_textbook": multiple_of_textbook(record),
    }
    return {key: value for key, value in values.items() if value is not None and value != ""}


def steady_times_ms(record: Record) -> list[float]:
    """Wall times of steps without the first and the watched ones; of all steps otherwise."""
    watched = record.timeline.step if record.timeline else None
    steady = [step for step in record.steps[1:] if not step.instrumented and step.step != watched]
    return [step.step_time_ms for step in steady or record.steps]


def multiple_of_textbook(record: Record) -> float | None:
    """Sent bytes over the textbook's, scalars left out; None if the textbook has none."""
    engine, experiment = record.manifest.engine, record.manifest.experiment
    is_known = engine in STUDIED and is_plain(experiment)
    flows = line_up(engine, experiment, record.ledger.rows) if is_known else []
    textbook = sum(flow.textbook for flow in flows)
    return sum(flow.sent for flow in flows) / textbook if textbook else None
