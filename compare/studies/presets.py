"""Layouts by the names people know them by: each is a few fields of `Layout`, given the devices."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from compare.contract.axes import DP_REPLICATE, DP_SHARD, PP, TP
from compare.contract.experiment import Experiment, ExperimentError, Layout, revalidate

Fields = dict[str, object]


class Preset(Struct, frozen=True):
    """A way of spreading a run over N devices."""

    description: str
    fields: Callable[[int], Fields]
    """The layout's fields for N devices."""
    devices: int = 4
    """How many devices the parity matrix takes: 8 where a layout has three dimensions."""


def _ddp(sync: str) -> Callable[[int], Fields]:
    return lambda devices: {DP_REPLICATE: devices, "gradient_sync": sync}


def _sharded(zero: int, **more: object) -> Callable[[int], Fields]:
    return lambda devices: {DP_SHARD: devices, "zero": zero, **more}


def _halves(name: str, other: str, *, factor: int = 2, **more: object) -> Callable[[int], Fields]:
    """`factor` devices along axis `name`, the rest along `other`."""

    def fields(devices: int) -> Fields:
        if devices % factor or devices == factor:
            raise ExperimentError(f"--devices {devices}: this preset needs a multiple of {factor} above it")
        return {name: factor, other: devices // factor, **more}

    return fields


def _thirds(*, rest: str, **given: object) -> Callable[[int], Fields]:
    """Two devices along each of two axes, the others along the axis `rest`."""

    def fields(devices: int) -> Fields:
        if devices % 4 or devices == 4:
            raise ExperimentError(
                f"--devices {devices}: this preset needs a multiple of 4 above it, such as 8"
            )
        return {**given, rest: devices // 4}

    return fields


def _pipeline(schedule: str, *, chunks: int = 1) -> Callable[[int], Fields]:
    """All devices along the pipeline, with as many microbatches in a pass."""
    return lambda devices: {PP: devices, "schedule": schedule, "chunks": chunks, "microbatches": devices}


PRESETS = {
    "single": Preset("one device", lambda devices: {}),
    "ddp": Preset("data parallel, gradients in buckets", _ddp("bucketed")),
    "ddp_naive": Preset("data parallel, one reduction per parameter", _ddp("naive")),
    "ddp_flat": Preset("data parallel, one reduction for all", _ddp("flat")),
    "ddp_overlapped": Preset("data parallel, reductions during backward", _ddp("overlapped")),
    "zero1": Preset("ZeRO-1: optimizer state split", _sharded(1)),
    "zero2": Preset("ZeRO-2: and gradients", _sharded(2)),
    "fsdp": Preset("ZeRO-3, FULL_SHARD: and parameters", _sharded(3)),
    "shard_grad_op": Preset(
        "FSDP that keeps gathered parameters until backward", _sharded(3, reshard_after_forward=False)
    ),
    "hsdp": Preset("fully sharded within replicas", _halves(DP_REPLICATE, DP_SHARD, zero=3)),
    "tp": Preset("tensor parallel", lambda devices: {TP: devices}),
    "tp_sp": Preset("tensor and sequence parallel", lambda devices: {TP: devices, "sequence_parallel": True}),
    "ddp_tp": Preset("data x tensor parallel", _halves(DP_REPLICATE, TP)),
    "fsdp_tp": Preset("fully sharded x tensor parallel", _halves(DP_SHARD, TP, zero=3)),
    "fsdp_tp_sp": Preset(
        "fully sharded x tensor and sequence parallel",
        _halves(DP_SHARD, TP, zero=3, sequence_parallel=True),
    ),
    "hsdp_tp": Preset(
        "replicas x fully sharded x tensor parallel",
        _thirds(dp_replicate=2, dp_shard=2, zero=3, rest=TP),
        devices=8,
    ),
    "pp": Preset("pipeline, 1F1B", _pipeline("1f1b")),
    "pp_gpipe": Preset("pipeline, GPipe", _pipeline("gpipe")),
    "pp_interleaved": Preset("pipeline, interleaved 1F1B", _pipeline("interleaved", chunks=2), devices=2),
    "pp_zero_bubble": Preset("pipeline, zero bubble (ZB-H1)", _pipeline("zero_bubble")),
    "ddp_pp": Preset("data x pipeline parallel", _halves(DP_REPLICATE, PP, microbatches=4)),
    "fsdp_pp": Preset("fully sharded x pipeline parallel", _halves(DP_SHARD, PP, zero=3, microbatches=4)),
    "tp_pp": Preset("tensor x pipeline parallel", _halves(TP, PP, microbatches=4)),
    "ddp_tp_pp": Preset(
        "data x tensor x pipeline parallel",
        _thirds(dp_replicate=2, tp=2, microbatches=4, rest=PP),
        devices=8,
    ),
    "fsdp_tp_pp": Preset(
        "fully sharded x tensor x pipeline parallel",
        _thirds(dp_shard=2, zero=3, tp=2, microbatches=4, rest=PP),
        devices=8,
    ),
}

CLASSIC = ("ddp", "zero1", "zero2", "fsdp", "tp")
"""The strategies that are compared with each other most."""

_SPREAD_OVER_NOTHING: Fields = {
    PP: 1,
    "schedule": "1f1b",
    "chunks": 1,
    "microbatches": 1,
    DP_REPLICATE: 1,
    DP_SHARD: 1,
    "zero": 0,
    "reshard_after_forward": True,
    TP: 1,
    "sequence_parallel": False,
}


SPREAD = tuple(_SPREAD_OVER_NOTHING)
"""The fields of a layout that say how a run is spread over devices."""


def check_names(flag: str, what: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Refuse a name that there is not, or that is given twice. Raises ExperimentError, naming the flag."""
    for name, count in Counter(names).items():
        if name not in known:
            raise ExperimentError(f"{flag} {name}: no such {what} (there are {', '.join(known)})")
        if count > 1:
            raise ExperimentError(f"{flag} {name}: give each {what} once")


def preset_layout(layout: Layout, preset: str, devices: int) -> Layout:
    """`layout` spread as the preset says; what it does not speak of stays: remat, bucket_mb, and the schedule
    of a composition with a pipeline.

    Raises:
        ExperimentError: no such preset, or a number of devices that it cannot spread over.
    """
    check_names("--preset", "preset", [preset], PRESETS)
    if devices < 1:
        raise ExperimentError(f"--devices {devices} must be at least 1")
    fields = PRESETS[preset].fields(devices)
    is_any_pipeline = fields.get(PP, 1) != 1 and "schedule" not in fields
    kept: Fields = {"schedule": layout.schedule, "chunks": layout.chunks} if is_any_pipeline else {}
    return msgspec.structs.replace(layout, **(_SPREAD_OVER_NOTHING | kept | fields))


def spread(experiment: Experiment, preset: str, devices: int = 1) -> Experiment:
    """The experiment under a preset, checked. `single` is one device, whatever its layout was."""
    layout = preset_layout(experiment.layout, preset, devices)
    return revalidate(msgspec.structs.replace(experiment, layout=layout))


def apply_preset(layout: Layout, *, preset: str, devices: int, default: Layout) -> Layout:
    """`preset_layout`, which must not contradict what the user set himself.

    Args:
        layout: the layout so far, the user's own overrides included.
        preset: a name in PRESETS.
        devices: how many devices the preset spreads over.
        default: the layout before the user's overrides, to see what the user chose himself.

    Raises:
        ExperimentError: as `preset_layout`, or the user set a field to something else than the preset does.
    """
    spread = preset_layout(layout, preset, devices)
    for key in Layout.__struct_fields__:
        chosen, value = getattr(layout, key), getattr(spread, key)
        if chosen not in (getattr(default, key), value):
            raise ExperimentError(
                f"--layout.{key} {chosen} contradicts --preset {preset} --devices {devices}, which sets it "
                f"to {value}: give one of them"
            )
    return spread
